"""What one forward pass computes: the tokens of a step, packed without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from shared.ops.attention import SequenceSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """The tokens of a step and where each belongs, on the model's device.

    Prefill chunks and single decoded tokens stand side by side; nothing tells them apart but
    their number.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64, each token's place in its own sequence."""
    slot_mapping: Tensor
    """[num_tokens] int64, where in the pool its keys and values go."""
    spans: tuple[SequenceSpan, ...]
    """One a sequence; they tile the tokens in order."""
