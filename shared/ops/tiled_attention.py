"""Attention of prompts whose lengths only the device knows: the torch reference.

What a CUDA graph has captured cannot change from one replay to the next, numbers that the host
passed included.  So the queries of a step are cut into tiles, and a tensor says of each which rows
it has and where its sequence's keys are; what a graph needs for another prompt is other numbers in
that tensor.  Nothing but a tile's own position limits how much context it looks at, so prompts,
their later chunks and single tokens of several sequences are all the same to it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

TILE_ROWS = 64
"""Most rows of a tile: as many as the matrix units take at least, for short prompts make few
tiles, and fewer rows a tile are more thread blocks."""


class TileField(IntEnum):
    """What the numbers of a tile say."""

    ROW = 0
    """Its first row in the step's tensors."""
    NUM_ROWS = 1
    """How many rows it has, one behind the other in one sequence; 0 for a tile that only pads."""
    POSITION = 2
    """The place of its first row in the sequence."""
    TABLE = 3
    """Where in `block_table` the sequence's blocks begin."""


def tiled_attention(
    query: Tensor,
    kv_layer: Tensor,
    tiles: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return causal attention of every query over its own sequence's context.

    Args:
        query: [num_tokens, num_heads, head_dim], contiguous, after the rotation.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool
            in the dtype of `query`, the step's own keys and values included.
        tiles: [num_tiles, 4] int64, contiguous, see `TileField`; no row is in two of them.
        block_table: [num_entries] int64, the tables of all sequences.  Behind the blocks that a
            tile needs it may hold anything.
        scale: What scores are multiplied with.
        window: A query looks at so many tokens, itself included; None for the whole context.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.  Rows of no tile mean nothing.

    Raises:
        ShapeError: A shape is not as above, or the heads cannot be grouped.
    """
    check_tile_shapes(query, kv_layer, tiles, block_table)
    out = torch.zeros_like(query)
    block_size = kv_layer.shape[3]
    for row, num_rows, position, entry in tiles.tolist():
        if not num_rows:
            continue
        context_len = position + num_rows
        num_blocks = -(-context_len // block_size)
        span = SequenceSpan(
            query_start=0,
            query_len=num_rows,
            context_len=context_len,
            block_table=block_table[entry : entry + num_blocks],
            window=window,
        )
        rows = slice(row, row + num_rows)
        out[rows] = paged_attention(query[rows], kv_layer, [span], scale=scale)
    return out


def check_tile_shapes(query: Tensor, kv_layer: Tensor, tiles: Tensor, block_table: Tensor) -> None:
    """Raise ShapeError unless the arguments of `tiled_attention` fit together."""
    num_heads, num_kv_heads = query.shape[1], kv_layer.shape[2]
    if num_heads % num_kv_heads or query.shape[2] != kv_layer.shape[4]:
        raise ShapeError(
            f"{num_heads} query heads of {query.shape[2]} cannot share {num_kv_heads} KV heads of "
            f"{kv_layer.shape[4]}"
        )
    if tiles.shape[1:] != (len(TileField),) or block_table.ndim != 1:
        raise ShapeError(
            f"{[*tiles.shape]} numbers are no tiles, or {[*block_table.shape]} no table"
        )
    if not all(tensor.is_contiguous() for tensor in (query, tiles, block_table)):
        raise ShapeError("queries, tiles and table must be contiguous")
