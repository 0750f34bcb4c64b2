"""The kernel of `shared.ops.triton.decode_attention`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["layer"])
def decode_attention_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    out: tl.tensor,
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slot_mapping: tl.tensor,
    bases: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    sums: tl.tensor,
    logs: tl.tensor,
    counters: tl.tensor,
    layer: tl.tensor,
    log2_scale: tl.tensor,
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
    PAD: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    JOINED_GROUP: tl.constexpr,
    JOINED_PARTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Attend over one part of one sequence's context; strides are in elements."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    part = tl.program_id(1)
    num_splits = tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)

    # Parts are equal in tiles, so a short context has fewer of them and none is empty.  A padding
    # row keeps one, which writes its zeros.
    tiles_a_part = tl.maximum(tl.cdiv(tl.cdiv(context_len, TILE), num_splits), 1)
    num_parts = tl.maximum(tl.cdiv(context_len, tiles_a_part * TILE), 1)
    if part >= num_parts:
        return
    first_token = part * tiles_a_part * TILE
    end_token = tl.minimum(first_token + tiles_a_part * TILE, context_len)

    row = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    is_row = row < GROUP
    is_dim = dim < HEAD_DIM
    is_output = is_row[:, None] & is_dim[None, :]
    head = kv_head * GROUP + row

    pointer = tl.pointer_type(qkv.dtype.element_ty)
    own_base = tl.load(bases)
    peer_base = tl.load(bases + 1)
    head_offset = layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_STRIDE
    table = block_tables + sequence * table_stride

    # The first tile is on its way before this step's query is there.  Only the newest token is of
    # this step, so it alone comes behind the wait, and not from the pool.
    newest = context_len - 1
    token = first_token + tl.arange(0, TILE)
    is_old = token < tl.minimum(end_token, newest)
    entry = tl.load(table + token // BLOCK_SIZE, mask=is_old, other=0)
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
    if IS_DEPENDENT:
        gdc_wait()

    # Rotated here, where the numbers are read anyway.
    heads = qkv + sequence * (num_kv_heads * (GROUP + 2)) * HEAD_DIM
    swapped = tl.where(dim < HEAD_DIM // 2, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
    turn = tl.load(cos + sequence * HEAD_DIM + dim, mask=is_dim, other=0.0)
    swapped_turn = tl.load(sin + sequence * HEAD_DIM + dim, mask=is_dim, other=0.0)
    queries = tl.load(heads + head[:, None] * HEAD_DIM + dim[None, :], mask=is_output, other=0.0)
    partners = tl.load(
        heads + head[:, None] * HEAD_DIM + swapped[None, :], mask=is_output, other=0.0
    )
    turned = queries.to(tl.float32) * turn[None, :]
    turned += partners.to(tl.float32) * swapped_turn[None, :]
    queries = turned.to(queries.dtype)

    # The last part has the newest token: its key and value are the step's own, and are kept.
    has_newest = (part == num_parts - 1) & (context_len > 0)
    is_new_dim = has_newest & is_dim
    newest_key = heads + (num_kv_heads * GROUP + kv_head) * HEAD_DIM
    key = tl.load(newest_key + dim, mask=is_new_dim, other=0.0)
    key_partner = tl.load(newest_key + swapped, mask=is_new_dim, other=0.0)
    key = (key.to(tl.float32) * turn + key_partner.to(tl.float32) * swapped_turn).to(key.dtype)
    value = tl.load(newest_key + num_kv_heads * HEAD_DIM + dim, mask=is_new_dim, other=0.0)
    slot = tl.load(slot_mapping + sequence)
    new_place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + head_offset + (slot % BLOCK_SIZE) * HEAD_DIM
    is_written = is_new_dim & (slot != PAD)
    target = (own_base + new_place * ITEM_BYTES).to(pointer) + dim
    tl.store(target, key, mask=is_written)
    tl.store(target + KV_STRIDE, value, mask=is_written)
    is_newest = token == newest
    keys = tl.where(is_newest[None, :], key[:, None], keys)
    values = tl.where(is_newest[:, None], value[None, :], values)
    # A later tile reads the newest token from the pool, whichever thread wrote it.
    tl.debug_barrier()

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
