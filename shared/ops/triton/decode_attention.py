"""Paged decode attention in one launch: split along the context, joined by whoever comes last.

A thread block takes one KV head of one sequence, with all the query heads that share it as rows of
one matrix, over one part of the context.  The grid follows from the batch size and the longest
context that may come; how many of a sequence's parts have work follows, on the device, from its
length.  The part that is done last, by an atomic counter, joins all of them: a second launch for
that would take as long as a short context does.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.ops.decode_attention import check_decode_shapes
from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair

TARGET_PROGRAMS = 528
"""Thread blocks that a launch aims at: four for each of the 132 multiprocessors of an H200.  A
constant, so that sums are split alike on every GPU."""

TILE_BYTES = 16 << 10
"""Keys that a thread block loads at once, and as many values: with three stages in flight two
thread blocks fill a multiprocessor's shared memory."""

NUM_WARPS = 4
NUM_STAGES = 3

JOINED_ELEMENTS = 4096
"""Partial sums that a thread block holds while it joins parts: 32 a thread."""

ALIGNMENT_BYTES = 16
"""Width of a thread's load; every token's row of a head must begin at a multiple."""

LOG2_E = math.log2(math.e)


class DecodeAttention:
    """Attention of up to `max_batch` sequences, with the scratch memory that its parts need.

    One object serves all batch sizes and layers of an engine, on one stream at a time: a launch
    leaves the scratch memory as it found it.

    Args:
        max_batch: Most sequences of a call.
        max_context_len: Longest context of any; with the batch size it fixes the grid.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Numbers of a head.
        device: Where it will run.
        target_programs: See `TARGET_PROGRAMS`.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_context_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        target_programs: int = TARGET_PROGRAMS,
    ) -> None:
        self._max_batch = max_batch
        self._max_context_len = max_context_len
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._target_programs = target_programs
        num_parts = max(batch * self.num_splits(batch) for batch in range(1, max_batch + 1))
        num_rows = num_parts * num_heads
        self._sums = torch.empty(num_rows * head_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)

    def num_splits(self, batch: int) -> int:
        """Return into how many parts the longest context of a batch of this size is cut."""
        _, num_kv_heads, head_dim = self._heads
        wanted = -(-self._target_programs // (batch * num_kv_heads))
        # Parts of less than a tile would be empty.  float32 has the smallest tiles.
        return max(1, min(wanted, -(-self._max_context_len // _tile_tokens(head_dim, 4))))

    def __call__(
        self,
        query: Tensor,
        pools: PoolPair,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        layer: int,
        scale: float,
    ) -> Tensor:
        """Return the attention of each sequence's one query; see `shared.ops.decode_attention`.

        Raises:
            ShapeError: As there, or the call is not what the object was made for.
        """
        check_decode_shapes(query, pools, block_tables, context_lens)
        batch, num_heads, head_dim = query.shape
        num_kv_heads, block_size = pools.own.shape[3:5]
        if batch > self._max_batch or (num_heads, num_kv_heads, head_dim) != self._heads:
            raise ShapeError(
                f"{batch} sequences of {num_heads} over {num_kv_heads} heads of {head_dim} do not "
                f"fit scratch memory for {self._max_batch} of {self._heads}"
            )
        item_bytes = query.element_size()
        if head_dim * item_bytes % ALIGNMENT_BYTES:
            raise ShapeError(f"a head of {head_dim} {query.dtype} is no multiple of 16 bytes")
        if query.stride(2) != 1 or block_tables.stride(1) != 1:
            raise ShapeError("queries and block tables must be contiguous in their last dimension")
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        num_splits = self.num_splits(batch)
        group = num_heads // num_kv_heads
        padded_dim = triton.next_power_of_2(head_dim)
        joined_parts = triton.next_power_of_2(num_splits)
        block_stride, layer_stride, kv_stride, head_stride = pools.own.stride()[:4]
        _decode_attention_kernel[(num_kv_heads, num_splits, batch)](
            out,
            query,
            pools.bases,
            block_tables,
            context_lens,
            self._sums,
            self._logs,
            self._counters,
            layer,
            scale * LOG2_E,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            BLOCK_STRIDE=block_stride,
            LAYER_STRIDE=layer_stride,
            KV_STRIDE=kv_stride,
            HEAD_STRIDE=head_stride,
            BLOCK_SIZE=block_size,
            ITEM_BYTES=item_bytes,
            GROUP=group,
            # The matrix units take no fewer than 16 rows.
            PADDED_GROUP=max(16, triton.next_power_of_2(group)),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            TILE=_tile_tokens(head_dim, item_bytes),
            NUM_SPLITS=num_splits,
            JOINED_PARTS=joined_parts,
            JOINED_COLUMNS=min(
                triton.next_power_of_2(group * head_dim),
                max(16, JOINED_ELEMENTS // joined_parts),
            ),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        return out


def _tile_tokens(head_dim: int, item_bytes: int) -> int:
    """Return how many tokens a thread block loads at once; the matrix units take at least 16."""
    padded_dim: int = triton.next_power_of_2(head_dim)
    return max(16, TILE_BYTES // (padded_dim * item_bytes))


@triton.jit(do_not_specialize=["layer"])
def _decode_attention_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    out: tl.tensor,
    query: tl.tensor,
    bases: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    sums: tl.tensor,
    logs: tl.tensor,
    counters: tl.tensor,
    layer: tl.tensor,
    log2_scale: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    JOINED_PARTS: tl.constexpr,
    JOINED_COLUMNS: tl.constexpr,
) -> None:
    """Attend over one part of one sequence's context; strides are in elements."""
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)

    # Parts are equal in tiles, so a short context has fewer of them and none is empty.  A padding
    # row keeps one, which writes its zeros.
    tiles_a_part = tl.maximum(tl.cdiv(tl.cdiv(context_len, TILE), NUM_SPLITS), 1)
    num_parts = tl.maximum(tl.cdiv(context_len, tiles_a_part * TILE), 1)
    if part >= num_parts:
        return
    first_token = part * tiles_a_part * TILE
    end_token = tl.minimum(context_len, first_token + tiles_a_part * TILE)

    row = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    is_row = row < GROUP
    is_dim = dim < HEAD_DIM
    is_output = is_row[:, None] & is_dim[None, :]
    head = kv_head * GROUP + row
    queries = tl.load(
        query + sequence * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=is_output,
        other=0.0,
    )

    pointer = tl.pointer_type(query.dtype.element_ty)
    own_base = tl.load(bases)
    peer_base = tl.load(bases + 1)
    head_offset = layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_STRIDE
    table = block_tables + sequence * table_stride

    highest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    weighted = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(first_token, end_token, TILE):
        token = start + tl.arange(0, TILE)
        is_live = token < end_token
        entry = tl.load(table + token // BLOCK_SIZE, mask=is_live, other=0)
        is_peer = entry < 0
        block = tl.where(is_peer, ~entry, entry).to(tl.int64)
        offset = block * BLOCK_STRIDE + head_offset + (token % BLOCK_SIZE) * HEAD_DIM
        address = tl.where(is_peer, peer_base, own_base) + offset * ITEM_BYTES
        # What a loaded address is aligned to, the compiler cannot know.
        address = tl.multiple_of(address, 16)
        keys = tl.load(
            address.to(pointer)[None, :] + dim[:, None],
            mask=is_live[None, :] & is_dim[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * log2_scale
        scores = tl.where(is_live[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        # Zero times NaN is NaN, so what lies behind the last token must not be loaded.
        values = tl.load(
            (address + KV_STRIDE * ITEM_BYTES).to(pointer)[:, None] + dim[None, :],
            mask=is_live[:, None] & is_dim[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        highest = new_highest

    # Of a padding row nothing was summed: zero through one is zero.
    attended = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    out_rows = out + (sequence * tl.num_programs(0) + kv_head) * GROUP * HEAD_DIM
    if num_parts == 1:
        tl.store(
            out_rows + row[:, None] * HEAD_DIM + dim[None, :],
            attended.to(out.dtype.element_ty),
            mask=is_output,
        )
        return

    lane = sequence * tl.num_programs(0) + kv_head
    lane_logs = logs + lane * NUM_SPLITS * GROUP
    lane_sums = sums + lane * NUM_SPLITS * GROUP * HEAD_DIM
    tl.store(lane_logs + part * GROUP + row, highest + tl.log2(total), mask=is_row)
    tl.store(
        lane_sums + (part * GROUP + row[:, None]) * HEAD_DIM + dim[None, :],
        attended,
        mask=is_output,
    )
    # Every thread's stores come before the count, and the count before the loads behind it.
    tl.debug_barrier()
    num_done = tl.atomic_add(counters + lane, 1, sem="acq_rel", scope="gpu")
    if num_done != num_parts - 1:
        return
    tl.store(counters + lane, 0)

    other = tl.arange(0, JOINED_PARTS)[:, None]
    for first_column in tl.static_range(0, GROUP * HEAD_DIM, JOINED_COLUMNS):
        column = first_column + tl.arange(0, JOINED_COLUMNS)
        is_column = column < GROUP * HEAD_DIM
        # Columns behind the last repeat it, so that nothing divides by zero; they are not stored.
        column = tl.minimum(column, GROUP * HEAD_DIM - 1)[None, :]
        # .cg: past the first cache, which other multiprocessors' stores do not reach.
        part_logs = tl.load(
            lane_logs + other * GROUP + column // HEAD_DIM,
            mask=other < num_parts,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part_sums = tl.load(
            lane_sums + other * (GROUP * HEAD_DIM) + column,
            mask=other < num_parts,
            other=0.0,
            cache_modifier=".cg",
        )
        share = tl.exp2(part_logs - tl.max(part_logs, 0)[None, :])
        joined = tl.sum(share * part_sums, 0) / tl.sum(share, 0)
        tl.store(
            out_rows + first_column + tl.arange(0, JOINED_COLUMNS),
            joined.to(out.dtype.element_ty),
            mask=is_column,
        )
