"""Chooses the next token of every row at once, without a word from the device.

The same choice as `shared.ops.sampling` makes row by row, in tensors of fixed shape: nothing is
read back and no shape depends on a value, so a GPU's queue never runs dry over it and a CUDA graph
can capture it.  The price is a sort and noise for the whole vocabulary where a row needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.ops.errors import ShapeError
from shared.ops.philox import WORD_MASK, uniform_rows
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.ops.sampling import SamplingParams


ALL_TOKENS = 1 << 40
"""A top-k that keeps everything: beyond any vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTensors:
    """The sampling parameters of a batch, one row a sequence, all on one device.

    A graph that was captured over these tensors follows what is copied into them later, as long as
    `is_filtered` and `is_drawn` cover it.
    """

    is_greedy: Tensor
    """[batch] bool."""
    temperature: Tensor
    """[batch] float32, above 0; 1 for greedy rows, whose draw is thrown away."""
    top_k: Tensor
    """[batch] int64, at least 1; larger than any vocabulary where all tokens are kept."""
    top_p: Tensor
    """[batch] float64, above 0; infinite where all tokens are kept."""
    log_min_p: Tensor
    """[batch] float32; -inf where all tokens are kept."""
    seed_words: Tensor
    """[batch, 2] int64 in [0, 2^32): the seed's low word and high word."""
    positions: Tensor
    """[batch] int64: the position that each new token will have."""
    is_filtered: bool
    """Some row may have a top-k or a top-p, so logits are sorted."""
    is_drawn: bool
    """Some row may be other than greedy, so noise is computed."""

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingTensors:
        """Return the tensors of a batch.

        Args:
            params: One a row.
            positions: One a row.
            device: Where they go, in one transfer.

        Raises:
            ShapeError: Parameters and positions are not equally many.
        """
        if len(params) != len(positions):
            raise ShapeError(f"{len(params)} parameters and {len(positions)} positions")
        whole = [
            (how.is_greedy, how.top_k or ALL_TOKENS, how.seed & WORD_MASK, how.seed >> 32, position)
            for how, position in zip(params, positions, strict=True)
        ]
        real = [
            (
                how.temperature or 1.0,
                how.top_p if how.top_p < 1 else math.inf,
                math.log(how.min_p) if how.min_p else -math.inf,
            )
            for how in params
        ]
        numbers = np.concatenate(
            [np.array(whole, np.int64).T, np.array(real, np.float64).T.copy().view(np.int64)]
        )
        on_device = to_device(numbers, torch.device(device))
        real_columns = on_device[5:].view(torch.float64)
        return cls(
            is_greedy=on_device[0] != 0,
            temperature=real_columns[0].float(),
            top_k=on_device[1],
            top_p=real_columns[1],
            log_min_p=real_columns[2].float(),
            seed_words=on_device[2:4].t(),
            positions=on_device[4],
            is_filtered=any(
                not how.is_greedy and (how.top_k > 0 or how.top_p < 1) for how in params
            ),
            is_drawn=any(not how.is_greedy for how in params),
        )


def sample_batch(logits: Tensor, how: SamplingTensors) -> Tensor:
    """Choose one token for every row.

    Args:
        logits: [batch, vocab_size] float32, -inf for what is forbidden.
        how: On the same device, one row a row.

    Returns:
        [batch] int64.  What a row gets does not depend on the others.

    Raises:
        ShapeError: Rows and parameters are not equally many.

    Enqueues on the current stream and never waits for the device.
    """
    if logits.shape[0] != how.positions.shape[0]:
        raise ShapeError(f"{logits.shape[0]} rows and {how.positions.shape[0]} parameters")
    likeliest = logits.argmax(-1)
    if not how.is_drawn:
        return likeliest
    # Measured from the best one, so that a tiny temperature does not overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(how.temperature.unsqueeze(1))
    edge = how.log_min_p.unsqueeze(1)
    if how.is_filtered:
        edge = torch.maximum(edge, _filter_edge(scaled, how))
    noise = uniform_rows(scaled.shape[1], positions=how.positions, seed_words=how.seed_words)
    scores = noise.log_().neg_().log_().neg_().add_(scaled)
    drawn = scores.masked_fill_(scaled < edge, -math.inf).argmax(-1)
    return torch.where(how.is_greedy, likeliest, drawn)


def _filter_edge(scaled: Tensor, how: SamplingTensors) -> Tensor:
    """Return [batch, 1], the smallest scaled logit that top-k and top-p keep."""
    ranked = scaled.sort(-1, descending=True).values
    last = ranked.shape[1] - 1
    top_k_edge = ranked.gather(1, (how.top_k - 1).clamp(max=last).unsqueeze(1))
    is_kept = ranked >= top_k_edge
    weights = ranked.exp().masked_fill_(~is_kept, 0)
    probabilities = weights / weights.sum(-1, keepdim=True)
    likelier = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    # The likeliest token is always inside; what ties with the last one inside is so by value.
    num_inside = ((likelier < how.top_p.unsqueeze(1)) & is_kept).sum(-1, keepdim=True)
    return ranked.gather(1, (num_inside - 1).clamp(min=0))
