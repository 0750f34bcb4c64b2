"""Decode attention over block tables: one query a sequence, everything in tensors of fixed shape.

This is the torch reference.  It gathers every sequence's whole table, so it costs the longest
context for each; `shared.ops.triton.decode_attention` is the fast one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from shared.ops.pool_pair import PoolPair


def decode_attention(
    query: Tensor,
    pools: PoolPair,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return the attention of each sequence's one query over its context.

    Args:
        query: [batch, num_heads, head_dim] in the pools' dtype, after the rotation; rows and heads
            may be strided.  Neighbouring query heads share a KV head.
        pools: Where the blocks are.
        block_tables: [batch, max_blocks] int32.  The sign picks the pool (`shared.ops.pool_pair`);
            entries behind a context's last block may be anything and are not followed.
        context_lens: [batch] int32, at most `max_blocks * block_size`, this step's token included.
            0 marks a row that pads the batch.
        layer: Which layer of the pools.
        scale: What scores are multiplied with.
        window: How many tokens at a context's end take part; None lets all of them.

    Returns:
        [batch, num_heads, head_dim], contiguous; padding rows are zero.  What lies behind a
        context's last token, NaN included, has no part in it.

    Raises:
        ShapeError: A shape or a dtype is not as above.

    Never synchronises with the device, so a CUDA graph can capture it.
    """
    check_decode_shapes(query, pools, block_tables, context_lens)
    batch, num_heads, head_dim = query.shape
    num_kv_heads, block_size = pools.own.shape[3:5]
    max_tokens = block_tables.shape[1] * block_size
    position = torch.arange(max_tokens, device=query.device)
    ends = context_lens.unsqueeze(1)
    is_live = position < ends

    entry = torch.where(is_live[:, ::block_size], block_tables, 0).long()
    if window is not None:
        is_live = is_live & (position >= ends - window)
    is_peer = entry < 0
    own = pools.own[:, layer].index_select(0, entry.clamp(min=0).flatten())
    peer = pools.peer[:, layer].index_select(0, (~entry).clamp(min=0).flatten())
    blocks = torch.where(is_peer.view(-1, 1, 1, 1, 1), peer, own)
    # [batch, block, K or V, head, token, dim] to [K or V, batch, head, position, dim].
    context = blocks.view(batch, -1, 2, num_kv_heads, block_size, head_dim)
    context = context.permute(2, 0, 3, 1, 4, 5).reshape(
        2, batch, num_kv_heads, max_tokens, head_dim
    )
    # Masking scores is not enough: zero times NaN is NaN.
    key, value = torch.where(is_live.view(batch, 1, max_tokens, 1), context, 0).unbind(0)

    grouped = query.reshape(batch, num_kv_heads, -1, head_dim)
    scores = (grouped @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    scores = scores.masked_fill(~is_live.view(batch, 1, 1, max_tokens), float("-inf"))
    # A padding row has no score at all, and its softmax would be NaN.
    weights = scores.softmax(-1).nan_to_num(0.0).to(query.dtype)
    return (weights @ value).reshape(batch, num_heads, head_dim)


def check_decode_shapes(
    query: Tensor, pools: PoolPair, block_tables: Tensor, context_lens: Tensor
) -> None:
    """Raise ShapeError unless the arguments of `decode_attention` fit together."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = pools.own.shape[3]
    if num_heads % num_kv_heads:
        raise ShapeError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads")
    if head_dim != pools.own.shape[5] or query.dtype is not pools.own.dtype:
        raise ShapeError(
            f"queries of {head_dim} {query.dtype} do not fit keys of {pools.own.shape[5]} "
            f"{pools.own.dtype}"
        )
    for name, tensor in (("block_tables", block_tables), ("context_lens", context_lens)):
        if tensor.dtype is not torch.int32 or tensor.shape[0] != batch:
            raise ShapeError(
                f"{name} must be int32 with {batch} rows, not {tensor.dtype} {[*tensor.shape]}"
            )
