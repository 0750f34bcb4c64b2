"""Rotation and KV write of a step in one launch: every number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.errors import ShapeError
from shared.ops.kv_write import PAD_SLOT
from shared.ops.rope_kv_write import check_rope_shapes
from shared.ops.triton.launch import Launch, ceil_div, padded

HEADS_A_PROGRAM = 8
"""Small, so that a single token still keeps several multiprocessors busy."""


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Return the rotated queries and fill the pool; see `shared.ops.rope_kv_write`.

    Of `cos` and `sin` only the second half of a row is read: `rotary_angles` makes both alike.

    Raises:
        ShapeError: As there, or the pool's heads are not contiguous.
    """
    num_heads = check_rope_shapes(qkv, kv_layer, slot_mapping)
    num_tokens, num_all_heads, head_dim = qkv.shape
    if kv_layer.stride()[3:] != (head_dim, 1) or not qkv.is_contiguous():
        raise ShapeError("a head's tokens in the pool, and the step's heads, must be contiguous")
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    _ROPE_KV_WRITE(
        (num_tokens, ceil_div(num_all_heads, HEADS_A_PROGRAM), 1),
        query,
        qkv,
        cos,
        sin,
        kv_layer,
        slot_mapping,
        BLOCK_STRIDE=kv_layer.stride(0),
        KV_STRIDE=kv_layer.stride(1),
        HEAD_STRIDE=kv_layer.stride(2),
        BLOCK_SIZE=kv_layer.shape[3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_layer.shape[2],
        HEAD_DIM=head_dim,
        PADDED_HALF=padded(head_dim // 2),
        HEADS=HEADS_A_PROGRAM,
        PAD=PAD_SLOT,
        num_warps=4 if qkv.dtype is torch.float32 else 2,
    )
    return query


@triton.jit
def _rope_kv_write_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    query: tl.tensor,
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    kv_layer: tl.tensor,
    slot_mapping: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Turn some heads of one token, or pass its values through; strides are in elements."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HALF)
    is_dim = dim < HALF
    is_read = (head < NUM_ALL_HEADS)[:, None] & is_dim[None, :]

    source = qkv + (token * NUM_ALL_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    low = tl.load(source, mask=is_read, other=0.0)
    high = tl.load(source + HALF, mask=is_read, other=0.0)
    c = tl.load(cos + token * HEAD_DIM + HALF + dim, mask=is_dim, other=0.0)[None, :]
    s = tl.load(sin + token * HEAD_DIM + HALF + dim, mask=is_dim, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    is_turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    new_low = tl.where(is_turned, (wide_low * c - wide_high * s).to(low.dtype), low)
    new_high = tl.where(is_turned, (wide_high * c + wide_low * s).to(low.dtype), high)

    target = query + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    is_query = (head < NUM_HEADS)[:, None] & is_read
    tl.store(target, new_low, mask=is_query)
    tl.store(target + HALF, new_high, mask=is_query)

    slot = tl.load(slot_mapping + token)
    if slot != PAD:
        place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM
        index = (head - NUM_HEADS).to(tl.int64)  # keys first, then values
        offset = (index // NUM_KV_HEADS) * KV_STRIDE + (index % NUM_KV_HEADS) * HEAD_STRIDE
        target = kv_layer + place + offset[:, None] + dim[None, :]
        is_written = (index >= 0)[:, None] & is_read
        tl.store(target, new_low, mask=is_written)
        tl.store(target + HALF, new_high, mask=is_written)


_ROPE_KV_WRITE = Launch(_rope_kv_write_kernel)
