"""What one forward pass computes: the tokens of a step, packed without padding, or one a row."""

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
    peer: Tensor | None = None
    """The peer's pool, like the own one but for the number of blocks, where spans have blocks in
    it."""
    output_rows: tuple[int, ...] | None = None
    """The tokens whose hidden states are wanted, ascending; None wants all of them.

    The last layer is computed for no others, and where none is wanted, as in the middle of a
    prompt, it ends with its keys and values.
    """
    output_index: Tensor | None = None
    """[num_outputs] int64: `output_rows` on the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeBatch:
    """One token a row, all of it in device tensors: what a CUDA graph can be captured over.

    A graph keeps these tensors and reads them anew at every replay, so a step is prepared by
    writing into them.  Rows that pad the batch to a graph's size have `PAD_SLOT` for a slot and 0
    for a context; what their token is does not matter, as long as there is such a token.
    """

    token_ids: Tensor
    """[batch] int64."""
    positions: Tensor
    """[batch] int64."""
    slot_mapping: Tensor
    """[batch] int64, where in the own pool the token's keys and values go; `PAD_SLOT` for none."""
    block_tables: Tensor
    """[batch, max_blocks] int32; the sign picks the pool (`shared.ops.pool_pair`)."""
    context_lens: Tensor
    """[batch] int32, this token included."""
