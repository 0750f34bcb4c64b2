"""The kernel of `shared.ops.triton.decode_attention`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["layer"])
def decode_attention_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
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
    MAX_SPLITS: tl.constexpr,
    JOINED_GROUP: tl.constexpr,
    JOINED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Attend over one part of one sequence's context; strides are in elements."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    num_splits = tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)

    # Behind a sliding window nothing is read.
    begin = context_len * 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW, 0)
    # Parts are equal in tiles, so a short context has fewer of them and none is empty.  A padding
    # row keeps one, which writes its zeros.
    num_live = context_len - begin
    tiles_a_part = tl.maximum(tl.cdiv(tl.cdiv(num_live, TILE), num_splits), 1)
    num_parts = tl.maximum(tl.cdiv(num_live, tiles_a_part * TILE), 1)
    if part >= num_parts:
        return
    first_token = begin + part * tiles_a_part * TILE
    end_token = tl.minimum(first_token + tiles_a_part * TILE, context_len)

    row = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    is_row = row < GROUP
    is_dim = dim < HEAD_DIM
    is_output = is_row[:, None] & is_dim[None, :]
    head = kv_head * GROUP + row

    pointer = tl.pointer_type(query.dtype.element_ty)
    own_base = tl.load(bases)
    peer_base = tl.load(bases + 1)
    head_offset = layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_STRIDE
    table = block_tables + sequence * table_stride

    # The first tile is on its way before this step's query is there.  Only the newest token was
    # written in this step, so it alone is loaded behind the wait.
    newest = context_len - 1
    token = first_token + tl.arange(0, TILE)
    is_old = token < tl.minimum(end_token, newest)
    entry = tl.load(table + token // BLOCK_SIZE, mask=token < end_token, other=0)
    address = _address(
        entry,
        token,
        own_base,
        peer_base,
        head_offset,
        BLOCK_STRIDE,
        BLOCK_SIZE,
        HEAD_DIM,
        ITEM_BYTES,
    )
    # What a loaded address is aligned to, the compiler cannot know; it would load number by
    # number.
    keys = tl.load(
        tl.multiple_of(address.to(pointer), 16)[None, :] + dim[:, None],
        mask=is_old[None, :] & is_dim[:, None],
        other=0.0,
    )
    # Zero times NaN is NaN, so what lies behind the last token must not be loaded.
    values = tl.load(
        tl.multiple_of((address + KV_STRIDE * ITEM_BYTES).to(pointer), 16)[:, None] + dim[None, :],
        mask=is_old[:, None] & is_dim[None, :],
        other=0.0,
    )
    is_newest = token == newest
    has_newest = (newest >= first_token) & (newest < first_token + TILE)
    newest_entry = tl.load(table + newest // BLOCK_SIZE, mask=has_newest, other=0)
    newest_address = _address(
        newest_entry,
        newest,
        own_base,
        peer_base,
        head_offset,
        BLOCK_STRIDE,
        BLOCK_SIZE,
        HEAD_DIM,
        ITEM_BYTES,
    )
    if IS_DEPENDENT:
        gdc_wait()
    queries = tl.load(
        query + sequence * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=is_output,
        other=0.0,
    )
    newest_key = tl.load(newest_address.to(pointer) + dim, mask=has_newest & is_dim, other=0.0)
    newest_value = tl.load(
        (newest_address + KV_STRIDE * ITEM_BYTES).to(pointer) + dim,
        mask=has_newest & is_dim,
        other=0.0,
    )
    keys = tl.where(is_newest[None, :], newest_key[:, None], keys)
    values = tl.where(is_newest[:, None], newest_value[None, :], values)

    highest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    weighted = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    if context_len > 0:
        highest, total, weighted = _attend(
            queries, keys, values, token < end_token, log2_scale, highest, total, weighted
        )
    for start in range(first_token + TILE, end_token, TILE):
        token = start + tl.arange(0, TILE)
        is_live = token < end_token
        entry = tl.load(table + token // BLOCK_SIZE, mask=is_live, other=0)
        address = _address(
            entry,
            token,
            own_base,
            peer_base,
            head_offset,
            BLOCK_STRIDE,
            BLOCK_SIZE,
            HEAD_DIM,
            ITEM_BYTES,
        )
        keys = tl.load(
            tl.multiple_of(address.to(pointer), 16)[None, :] + dim[:, None],
            mask=is_live[None, :] & is_dim[:, None],
            other=0.0,
        )
        values = tl.load(
            tl.multiple_of((address + KV_STRIDE * ITEM_BYTES).to(pointer), 16)[:, None]
            + dim[None, :],
            mask=is_live[:, None] & is_dim[None, :],
            other=0.0,
        )
        highest, total, weighted = _attend(
            queries, keys, values, is_live, log2_scale, highest, total, weighted
        )

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
    lane_logs = logs + lane * num_splits * GROUP
    lane_sums = sums + lane * num_splits * GROUP * HEAD_DIM
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

    # .cg: past the first cache, which other multiprocessors' stores do not reach.
    every = tl.arange(0, MAX_SPLITS)
    row = tl.arange(0, JOINED_GROUP)
    is_row = row < GROUP
    # Rows behind the last and parts that are none weigh nothing; 0 keeps NaN out of such rows.
    every_log = tl.load(
        lane_logs + every[:, None] * GROUP + row[None, :],
        mask=(every < num_parts)[:, None] & is_row[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.where(is_row, tl.max(every_log, 0), 0.0)
    total = tl.where(is_row, tl.sum(tl.exp2(every_log - top[None, :]), 0), 1.0)
    joined = tl.zeros([JOINED_GROUP, PADDED_DIM], tl.float32)
    for first_part in range(0, num_parts, JOINED_PARTS):
        other = first_part + tl.arange(0, JOINED_PARTS)
        is_joined = (other < num_parts)[:, None] & is_row[None, :]
        place = other[:, None] * GROUP + row[None, :]
        part_log = tl.load(
            lane_logs + place, mask=is_joined, other=float("-inf"), cache_modifier=".cg"
        )
        part_sum = tl.load(
            lane_sums + place[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=is_joined[:, :, None] & is_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        share = tl.exp2(part_log - top[None, :])
        joined += tl.sum(share[:, :, None] * part_sum, 0)
    tl.store(
        out_rows + row[:, None] * HEAD_DIM + dim[None, :],
        (joined / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit
def _address(  # noqa: PLR0917 -- as above
    entry: tl.tensor,
    token: tl.tensor,
    own_base: tl.tensor,
    peer_base: tl.tensor,
    head_offset: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
) -> tl.tensor:
    """Return where the keys of tokens lie, given their block-table entries."""
    is_peer = entry < 0
    block = tl.where(is_peer, ~entry, entry).to(tl.int64)
    offset = block * BLOCK_STRIDE + head_offset + (token % BLOCK_SIZE) * HEAD_DIM
    return tl.where(is_peer, peer_base, own_base) + offset * ITEM_BYTES


@triton.jit
def _attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    is_live: tl.tensor,
    log2_scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one tile to a running softmax in base 2."""
    scores = tl.dot(queries, keys, input_precision="ieee") * log2_scale
    scores = tl.where(is_live[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores - new_highest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    weighted = weighted * shrink[:, None]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    return new_highest, total, weighted
