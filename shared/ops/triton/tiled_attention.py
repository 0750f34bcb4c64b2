"""Attention of short prompts straight out of the blocks of the pool, for CUDA graphs.

A thread block takes one query head of one tile and runs over its keys up to the last one that the
tile may see.  Everything it needs to know about the tile it reads on the device.  Longer prompts
are for `prefill_attention`, whose kernels are faster where there is enough to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.errors import ShapeError
from shared.ops.tiled_attention import TILE_ROWS, TileField, check_tile_shapes
from shared.ops.triton.launch import Launch, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """How a thread block works."""

    tile_bytes: int = 16 << 10
    """Of keys, and of values, that are loaded at once."""
    num_warps: int = 4
    num_stages: int = 2


WIDE_PLAN = TilePlan(num_warps=8, num_stages=2)
"""For float32 and heads of more than 128 numbers: the sums alone fill the registers of 4 warps."""

MAX_NARROW_DIM = 128

MIN_KEYS, MAX_KEYS = 16, 128
"""At once: fewer the matrix units do not take, and more fill the registers with scores."""


def plan_for(head_dim: int, dtype: torch.dtype) -> TilePlan:
    """Return how heads of some width and type are worked on."""
    is_narrow = head_dim <= MAX_NARROW_DIM and dtype is not torch.float32
    return TilePlan() if is_narrow else WIDE_PLAN


def tiled_attention(
    query: Tensor,
    kv_layer: Tensor,
    tiles: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None = None,
    plan: TilePlan | None = None,
) -> Tensor:
    """Return causal attention of tiles; see `shared.ops.tiled_attention`.

    `plan` is for measuring; by default it is what suits the heads.

    Raises:
        ShapeError: As there, or the pool's heads are not contiguous.
    """
    check_tile_shapes(query, kv_layer, tiles, block_table)
    _, num_heads, head_dim = query.shape
    if kv_layer.stride()[3:] != (head_dim, 1):
        raise ShapeError("a head's tokens in the pool must be contiguous")
    plan = plan or plan_for(head_dim, query.dtype)
    keys = plan.tile_bytes // (padded(head_dim) * query.dtype.itemsize)
    # Rows that no tile names, those that pad, go on through the layers: as numbers, and not as
    # whatever was in the memory, which may overflow or be NaN.
    out = torch.zeros_like(query)
    _TILED_ATTENTION(
        (num_heads, tiles.shape[0], 1),
        out,
        query,
        kv_layer,
        tiles,
        block_table,
        scale * math.log2(math.e),
        BLOCK_STRIDE=kv_layer.stride(0),
        KV_STRIDE=kv_layer.stride(1),
        HEAD_STRIDE=kv_layer.stride(2),
        BLOCK_SIZE=kv_layer.shape[3],
        GROUP=num_heads // kv_layer.shape[2],
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        ROWS=TILE_ROWS,
        KEYS=min(MAX_KEYS, max(MIN_KEYS, keys)),
        WINDOW=window or 0,
        NUM_FIELDS=len(TileField),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return out


@triton.jit
def _tiled_attention_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    out: tl.tensor,
    query: tl.tensor,
    kv_layer: tl.tensor,
    tiles: tl.tensor,
    block_table: tl.tensor,
    log2_scale: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Attend with one head of one tile; strides are in elements."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    tile = tiles + tl.program_id(1) * NUM_FIELDS  # in the order of `TileField`
    first_row = tl.load(tile)
    num_rows = tl.load(tile + 1).to(tl.int32)
    first_position = tl.load(tile + 2).to(tl.int32)
    table = block_table + tl.load(tile + 3)
    # Also in tiles that only pad: a launch must not end before the one ahead of it has.
    if IS_DEPENDENT:
        gdc_wait()
    if num_rows == 0:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    is_place = (row < num_rows)[:, None] & is_dim[None, :]
    place = ((first_row + row) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(query + place, mask=is_place, other=0.0)
    position = first_position + row
    heads = kv_layer + (head // GROUP) * HEAD_STRIDE

    # Finite, since behind a window a row may see nothing of the first keys: -inf from -inf is NaN.
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    end = first_position + num_rows
    begin = first_position * 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        offset = block * BLOCK_STRIDE + (key % BLOCK_SIZE) * HEAD_DIM
        keys = tl.load(
            heads + offset[None, :] + dim[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        # Zero times NaN is NaN, so what lies behind the last token must not be loaded.
        values = tl.load(
            heads + KV_STRIDE + offset[:, None] + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * log2_scale
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        highest = new_highest
    # A row that only pads may have seen nothing; it is not stored.
    attended = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + place, attended.to(out.dtype.element_ty), mask=is_place)


_TILED_ATTENTION = Launch(_tiled_attention_kernel)
