"""Paged attention: every query of a step against the context that its sequence's blocks hold.

One function serves prefill chunks and decode in any mixture.  Each sequence is computed alone,
over exactly the tokens it has, so

*   what lies behind a sequence's last token, NaN included, is never read into a product, and
*   a sequence's attention is the same numbers whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceSpan:
    """One sequence's part of a step: which rows are its queries, and where its context lies.

    The queries are the last `query_len` tokens of the context; their keys and values are in the
    pool before attention runs.

    Raises:
        ShapeError: There is no query, or there are more queries than context.
    """

    query_start: int
    """First row of the step's tensors that belongs to the sequence."""
    query_len: int
    context_len: int
    """Tokens that the pool holds for the sequence, this step's included."""
    block_table: Tensor
    """[num_blocks] int64, on the pool's device: as many block ids as the context needs."""
    num_in_place: int = 0
    """How many of the leading blocks are in the peer's pool; those ids are its own."""
    window: int | None = None
    """A query looks at so many tokens, itself included; None lets it look at the whole context."""

    def __post_init__(self) -> None:
        if not 1 <= self.query_len <= self.context_len:
            raise ShapeError(
                f"{self.query_len} queries cannot end a context of {self.context_len} tokens"
            )

    @property
    def first_key(self) -> int:
        """The first token of the context at which any of the queries looks."""
        if self.window is None:
            return 0
        return max(0, self.context_len - self.query_len + 1 - self.window)

    @cached_property
    def mask(self) -> Tensor | None:
        """[query_len, context_len - first_key] bool, True where a query may look.

        None where no table of it is needed: for a single query, and where the whole context is
        being computed and fits the window.  Made once for all layers, and only where the
        attention in use asks.
        """
        is_windowed = self.window is not None and self.context_len > self.window
        if self.query_len == 1 or (self.query_len == self.context_len and not is_windowed):
            return None
        device = self.block_table.device
        columns = torch.arange(self.first_key, self.context_len, device=device)
        rows = torch.arange(self.context_len - self.query_len, self.context_len, device=device)
        behind = rows.unsqueeze(1) - columns
        return behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)


def paged_attention(
    query: Tensor,
    kv_layer: Tensor,
    spans: Sequence[SequenceSpan],
    *,
    scale: float,
    peer_layer: Tensor | None = None,
) -> Tensor:
    """Return causal attention of every query over its own sequence's context.

    Args:
        query: [num_tokens, num_heads, head_dim], after the rotation.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool
            in the dtype of `query`.  `num_heads` is a multiple of `num_kv_heads`; neighbouring
            query heads share one.
        spans: They tile the rows of `query` in order.
        scale: What scores are multiplied with, commonly `head_dim ** -0.5`.
        peer_layer: As `kv_layer`, of the peer's pool, where spans have blocks in it.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.

    Raises:
        ShapeError: The heads cannot be grouped, the spans do not tile the rows, or a block table
            is not as long as its context needs.
    """
    num_tokens, num_heads, _ = query.shape
    if num_heads % kv_layer.shape[2]:
        raise ShapeError(f"{num_heads} query heads cannot share {kv_layer.shape[2]} KV heads")
    outputs: list[Tensor] = []
    row = 0
    for span in spans:
        if span.query_start != row:
            raise ShapeError(f"a sequence starts at row {span.query_start}, expected {row}")
        row += span.query_len
        key, value = _gather_context(kv_layer, span, peer_layer)
        outputs.append(_attend(query[span.query_start : row], key, value, span.mask, scale))
    if row != num_tokens:
        raise ShapeError(f"the sequences have {row} rows, the queries {num_tokens}")
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def row_spans(
    spans: Sequence[SequenceSpan], rows: Sequence[int], *, block_size: int
) -> Iterator[SequenceSpan]:
    """Yield a span for each of some rows of a step, for attention with those queries alone.

    Args:
        spans: They tile the step's rows.
        rows: Rows of the step, ascending.
        block_size: Of the pool.
    """
    following = iter(spans)
    span = next(following)
    for number, row in enumerate(rows):
        while row >= span.query_start + span.query_len:
            span = next(following)
        context_len = span.context_len - (span.query_start + span.query_len - 1 - row)
        yield SequenceSpan(
            query_start=number,
            query_len=1,
            context_len=context_len,
            block_table=span.block_table[: -(-context_len // block_size)],
            num_in_place=span.num_in_place,
            window=span.window,
        )


def _gather_context(
    kv_layer: Tensor, span: SequenceSpan, peer_layer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Copy a sequence's keys and values out of its blocks.

    Returns:
        Two tensors [num_kv_heads, 1, context_len - first_key, head_dim]: each KV head is a batch
        entry of its own, so the query heads that share it can share it by strides.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    num_blocks = span.block_table.shape[0]
    if num_blocks != -(-span.context_len // block_size):
        raise ShapeError(
            f"{num_blocks} blocks of {block_size} do not fit a context of {span.context_len} tokens"
        )
    first_block, first_token = divmod(span.first_key, block_size)
    table = span.block_table[first_block:] if first_block else span.block_table
    num_in_place = max(0, span.num_in_place - first_block)
    blocks = _select(kv_layer, table[num_in_place:])
    if num_in_place:
        if peer_layer is None:
            raise ShapeError(f"{num_in_place} blocks are in a peer's pool, and there is none")
        blocks = torch.cat((_select(peer_layer, table[:num_in_place]), blocks), 2)
    context = blocks.view(2, num_kv_heads, 1, -1, head_dim)
    num_keys = span.context_len - span.first_key
    key, value = context[:, :, :, first_token : first_token + num_keys].unbind(0)
    return key, value


def _select(kv_layer: Tensor, table: Tensor) -> Tensor:
    """Copy blocks out of a pool: [2, num_kv_heads, num_blocks, block_size, head_dim]."""
    # Selecting along the third dimension puts heads outside tokens in the same copy.
    return kv_layer.permute(1, 2, 0, 3, 4).index_select(2, table)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with [query_len, num_heads, head_dim] over one sequence's context."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, _, context_len, _ = key.shape
    num_shared = num_heads // num_kv_heads
    if query_len == 1:
        # The query heads that share a KV head are the rows of one matrix: no mask is needed, and
        # keys are read once for all of them.
        grouped = query.view(num_kv_heads, 1, num_shared, head_dim)
    else:
        grouped = query.view(query_len, num_kv_heads, num_shared, head_dim).permute(1, 2, 0, 3)
        shared = (num_kv_heads, num_shared, context_len, head_dim)
        key, value = key.expand(shared), value.expand(shared)
    attended = functional.scaled_dot_product_attention(
        grouped,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query_len > 1,
        scale=scale,
    )
    if query_len == 1:
        return attended.reshape(1, num_heads, head_dim)
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
