"""Chooses the next token of every row at once, without a word from the device.

The same choice as `shared.ops.sampling` makes row by row, in tensors of fixed shape: nothing is
read back and no shape depends on a value, so a GPU's queue never runs dry over it and a CUDA graph
can capture it.  The price is a sort and noise for the whole vocabulary where a row needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError
from shared.ops.philox import WORD_MASK, uniform_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.ops.sampling import SamplingParams


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
    is_filtered: bool
    """Some row may have a top-k or a top-p, so logits are sorted."""
    is_drawn: bool
    """Some row may be other than greedy, so noise is computed."""

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu"
    ) -> SamplingTensors:
        """Return the tensors of some requests' parameters."""

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        words = [[how.seed & WORD_MASK, how.seed >> 32] for how in params]
        return cls(
            is_greedy=column([how.is_greedy for how in params], torch.bool),
            temperature=column([how.temperature or 1.0 for how in params], torch.float32),
            top_k=column([how.top_k or 1 << 62 for how in params], torch.int64),
            top_p=column(
                [how.top_p if how.top_p < 1 else math.inf for how in params], torch.float64
            ),
            log_min_p=column(
                [math.log(how.min_p) if how.min_p else -math.inf for how in params], torch.float32
            ),
            seed_words=torch.tensor(words, dtype=torch.int64).to(device, non_blocking=True),
            is_filtered=any(
                not how.is_greedy and (how.top_k > 0 or how.top_p < 1) for how in params
            ),
            is_drawn=any(not how.is_greedy for how in params),
        )


def sample_batch(logits: Tensor, how: SamplingTensors, positions: Tensor) -> Tensor:
    """Choose one token for every row.

    Args:
        logits: [batch, vocab_size] float32, -inf for what is forbidden.
        how: On the same device, one row a row.
        positions: [batch] int64, there too: the position that each new token will have.

    Returns:
        [batch] int64.  What a row gets does not depend on the others.

    Raises:
        ShapeError: Rows, parameters and positions are not equally many.

    Enqueues on the current stream and never waits for the device.
    """
    batch = logits.shape[0]
    if not batch == how.temperature.shape[0] == positions.shape[0]:
        raise ShapeError(
            f"{batch} rows, {how.temperature.shape[0]} parameters and "
            f"{positions.shape[0]} positions"
        )
    likeliest = logits.argmax(-1)
    if not how.is_drawn:
        return likeliest
    # Measured from the best one, so that a tiny temperature does not overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(how.temperature.unsqueeze(1))
    edge = how.log_min_p.unsqueeze(1)
    if how.is_filtered:
        edge = torch.maximum(edge, _filter_edge(scaled, how))
    noise = uniform_rows(scaled.shape[1], positions=positions, seed_words=how.seed_words)
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
