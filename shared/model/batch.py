"""What one forward pass computes: the tokens of a step, packed without padding, or one a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shared.ops.attention import SequenceSpan, row_spans

if TYPE_CHECKING:
    from torch import Tensor


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

    @property
    def wants_all(self) -> bool:
        """Whether every token's hidden state is wanted."""
        return self.output_rows is None or len(self.output_rows) == self.token_ids.shape[0]

    def output_spans(self, block_size: int) -> tuple[SequenceSpan, ...]:
        """Return one a wanted token, or `spans` where all are."""
        if self.output_rows is None or self.wants_all:
            return self.spans
        return tuple(row_spans(self.spans, self.output_rows, block_size=block_size))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """The tokens of a short step in device tensors of fixed size, for a CUDA graph.

    It says what a `ForwardBatch` does, but so that nothing the host passes depends on it: a graph
    keeps these tensors and reads them anew at every replay.  Tokens that pad have `PAD_SLOT` for a
    slot and are in no tile; what else they say does not matter, as long as there is such a token.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64."""
    slot_mapping: Tensor
    """[num_tokens] int64; `PAD_SLOT` for none."""
    tiles: Tensor
    """[num_tiles, 4] int64, see `shared.ops.tiled_attention`."""
    output_index: Tensor
    """[num_outputs] int64, the tokens whose hidden states are wanted."""
    output_tiles: Tensor
    """[num_outputs, 4] int64, a tile for each of them alone; its row is the output's number."""
    block_table: Tensor
    """[num_entries] int64, of all sequences, one behind the other."""
    wants_all: ClassVar[Literal[False]] = False
    """See `ForwardBatch`; the wanted tokens are always picked."""


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
