"""How likely tokens were to the model itself, before bias, penalties and temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of one sampled token's probability, and the likeliest tokens'."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, its logarithm), the likeliest first."""


class LogprobTensors(NamedTuple):
    """The same for a batch, still on the device."""

    chosen: Tensor
    """[batch] float32."""
    top_ids: Tensor
    """[batch, num_top] int64."""
    top: Tensor
    """[batch, num_top] float32."""

    def row(self, index: int, num_top: int) -> TokenLogprob:
        """Return one row's first `num_top` entries; reads from the device."""
        ids, logprobs = self.top_ids[index, :num_top], self.top[index, :num_top]
        return TokenLogprob(
            float(self.chosen[index]), tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
        )


def token_logprobs(logits: Tensor, chosen: Tensor, *, num_top: int) -> LogprobTensors:
    """Return how likely the chosen tokens and the likeliest ones are.

    Args:
        logits: [batch, vocab_size] float32, the model's own.
        chosen: [batch] int64.
        num_top: How many of the likeliest; at most `vocab_size`.  Equal ones come in any order.

    Never waits for the device.
    """
    # A logit of -inf or NaN comes from broken weights only; the wire carries finite numbers.
    logprobs = logits.log_softmax(-1).nan_to_num_(nan=torch.finfo(logits.dtype).min)
    top, top_ids = logprobs.topk(num_top, dim=-1)
    return LogprobTensors(logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), top_ids, top)
