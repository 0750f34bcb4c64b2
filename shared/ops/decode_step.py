"""All that a decode step does between two products: rotation, KV write and attention, in one op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.ops.decode_attention import decode_attention
from shared.ops.rope_kv_write import rope_kv_write

if TYPE_CHECKING:
    from torch import Tensor

    from shared.ops.pool_pair import PoolPair


def decode_step(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    pools: PoolPair,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Rotate and write one token a sequence, and attend with it.

    Args:
        qkv: [batch, num_heads + 2 · num_kv_heads, head_dim], as `rope_kv_write` takes it.
        cos: [batch, 1, head_dim] float32, of `rotary_angles`.
        sin: As `cos`.
        slot_mapping: [batch] int64, where in the own pool each token goes: the place that its
            row's table and context length say, or `PAD_SLOT` in a row that pads the batch.
        pools: Where the blocks are.
        block_tables: As `decode_attention` takes them; the newest token's block is an own one.
        context_lens: [batch] int32, this token included; 0 in a row that pads the batch.
        layer: Which layer of the pools.
        scale: What scores are multiplied with.
        window: How many tokens back a token sees, itself included; None for all.

    Returns:
        [batch, num_heads, head_dim], contiguous; padding rows are zero.

    Raises:
        ShapeError: A shape or a dtype is not as above.
    """
    query = rope_kv_write(qkv, cos, sin, pools.own[:, layer], slot_mapping)
    return decode_attention(
        query, pools, block_tables, context_lens, layer=layer, scale=scale, window=window
    )
