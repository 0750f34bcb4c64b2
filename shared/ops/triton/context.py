"""Context out of its blocks, and attention over two parts joined, in one pass each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.context import check_context_shapes, check_join_shapes
from shared.ops.errors import ShapeError
from shared.ops.triton.launch import Launch, ceil_div, padded

TOKENS = 8
"""Of a thread block of the gather, for each of which it copies every head."""


def gather_context(
    kv_layer: Tensor, block_table: Tensor, context_len: int, *, padded_len: int
) -> Tensor:
    """Copy a sequence's keys and values out of its blocks; see `shared.ops.context`.

    Raises:
        ShapeError: As there, or the pool's heads are not contiguous.
    """
    check_context_shapes(kv_layer, block_table, context_len, padded_len)
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    if kv_layer.stride()[3:] != (head_dim, 1):
        raise ShapeError("a head's tokens in the pool must be contiguous")
    context = kv_layer.new_empty(2, padded_len, num_kv_heads, head_dim)
    _GATHER_CONTEXT(
        (ceil_div(padded_len, TOKENS), num_kv_heads, 2),
        context,
        kv_layer,
        block_table,
        context_len,
        padded_len,
        BLOCK_STRIDE=kv_layer.stride(0),
        KV_STRIDE=kv_layer.stride(1),
        HEAD_STRIDE=kv_layer.stride(2),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        TOKENS=TOKENS,
        num_warps=2,
    )
    return context


def join_attention(out: Tensor, logs: Tensor, other: Tensor, other_logs: Tensor) -> None:
    """Join attention over two parts of a context; see `shared.ops.context`.

    Raises:
        ShapeError: As there.
    """
    check_join_shapes(out, logs, other, other_logs)
    num_tokens, num_heads, head_dim = out.shape
    _JOIN_ATTENTION(
        (num_tokens, 1, 1),
        out,
        logs,
        other,
        other_logs,
        num_tokens,
        HEADS=num_heads,
        PADDED_HEADS=padded(num_heads),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded(head_dim),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["context_len", "padded_len"])
def _gather_context_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    context: tl.tensor,
    kv_layer: tl.tensor,
    block_table: tl.tensor,
    context_len: tl.tensor,
    padded_len: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Copy some tokens of one head's keys or values."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head, is_value = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = (dim < HEAD_DIM)[None, :]
    is_live = token < context_len
    block = tl.load(block_table + token // BLOCK_SIZE, mask=is_live, other=0)
    place = block * BLOCK_STRIDE + is_value * KV_STRIDE + head * HEAD_STRIDE
    place += (token % BLOCK_SIZE) * HEAD_DIM
    numbers = tl.load(
        kv_layer + place[:, None] + dim[None, :], mask=is_live[:, None] & is_dim, other=0.0
    )
    row = is_value * padded_len + token
    target = context + (row * tl.num_programs(1) + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, numbers, mask=(token < padded_len)[:, None] & is_dim)


@triton.jit(do_not_specialize=["num_tokens"])
def _join_attention_kernel(  # noqa: PLR0917 -- as above
    out: tl.tensor,
    logs: tl.tensor,
    other: tl.tensor,
    other_logs: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Join one token's heads."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)
    dim = tl.arange(0, PADDED_DIM)
    is_head = head < HEADS
    is_place = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    ours = tl.load(logs + head * num_tokens + token, mask=is_head, other=0.0)
    theirs = tl.load(other_logs + head * num_tokens + token, mask=is_head, other=0.0)
    top = tl.maximum(ours, theirs)
    both = top + tl.log(tl.exp(ours - top) + tl.exp(theirs - top))
    place = (token * HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    numbers = tl.load(out + place, mask=is_place, other=0.0).to(tl.float32)
    others = tl.load(other + place, mask=is_place, other=0.0).to(tl.float32)
    joined = numbers * tl.exp(ours - both)[:, None] + others * tl.exp(theirs - both)[:, None]
    tl.store(out + place, joined.to(out.dtype.element_ty), mask=is_place)
    tl.store(logs + head * num_tokens + token, both, mask=is_head)


_GATHER_CONTEXT = Launch(_gather_context_kernel)
_JOIN_ATTENTION = Launch(_join_attention_kernel)
