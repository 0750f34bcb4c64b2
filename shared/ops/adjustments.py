"""Changes logits before a token is chosen: bias, then what was said before.

The meaning and the order are those of transformers, which has the bias, the repetition penalty and
the ban on ends; presence and frequency penalty are OpenAI's, counted over the answer alone.
Everything is a tensor of fixed shape and nothing is read back, so a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    """What was said before, and what each row makes of it."""

    repetition: Tensor
    """[batch] float32, above 0; 1 changes nothing."""
    presence: Tensor
    """[batch] float32; 0 changes nothing."""
    frequency: Tensor
    """[batch] float32; 0 changes nothing."""
    is_in_prompt: Tensor
    """[batch, vocab_size] bool."""
    counts: Tensor
    """[batch, vocab_size] int32: how often the answer so far has each token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adjustments:
    """How a batch's logits are changed."""

    bias_ids: Tensor
    """[batch, max_entries] int64; entries that pad a row name any token and have the bias 0."""
    bias: Tensor
    """[batch, max_entries] float32, -inf for what is forbidden."""
    penalties: Penalties | None
    """None where no row has one."""


def adjust_logits(logits: Tensor, how: Adjustments) -> None:
    """Change logits in place.

    Args:
        logits: [batch, vocab_size] float32.
        how: On the same device, one row a row.

    Raises:
        ShapeError: The shapes do not fit together.
    """
    batch, vocab_size = logits.shape
    if not how.bias_ids.shape == how.bias.shape or how.bias.shape[0] != batch:
        raise ShapeError(
            f"{batch} rows cannot take a bias of shapes {[*how.bias_ids.shape]}, "
            f"{[*how.bias.shape]}"
        )
    logits.scatter_add_(1, how.bias_ids, how.bias)
    said = how.penalties
    if said is None:
        return
    if not said.counts.shape == said.is_in_prompt.shape == (batch, vocab_size):
        raise ShapeError(
            f"logits of shape {[batch, vocab_size]} cannot take counts of {[*said.counts.shape]} "
            f"and prompts of {[*said.is_in_prompt.shape]}"
        )
    repetition = said.repetition.unsqueeze(1)
    is_in_answer = said.counts > 0
    weakened = torch.where(logits < 0, logits * repetition, logits / repetition)
    is_weakened = (said.is_in_prompt | is_in_answer) & (repetition != 1)
    logits.copy_(torch.where(is_weakened, weakened, logits))
    logits.sub_(said.counts * said.frequency.unsqueeze(1))
    logits.sub_(is_in_answer * said.presence.unsqueeze(1))
