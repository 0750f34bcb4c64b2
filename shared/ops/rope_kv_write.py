"""The rotation of a step's queries and keys, and the write of its keys and values, in one op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.ops.errors import ShapeError
from shared.ops.kv_write import write_kv
from shared.ops.rotary import apply_rotary

if TYPE_CHECKING:
    from torch import Tensor


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Return the rotated queries; put rotated keys, and values, into one layer of the pool.

    Args:
        qkv: [num_tokens, num_heads + 2 · num_kv_heads, head_dim], contiguous, pool dtype: queries,
            keys and values of a token side by side, as one product made them.
        cos: [num_tokens, 1, head_dim] float32, of `rotary_angles`.
        sin: As `cos`.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool.
        slot_mapping: [num_tokens] int64, no slot twice.  For rows equal to `PAD_SLOT` nothing is
            written; their queries are rotated like any other.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.

    Raises:
        ShapeError: A shape or a dtype is not as above.
    """
    num_heads = check_rope_shapes(qkv, kv_layer, slot_mapping)
    num_rotated = num_heads + kv_layer.shape[2]
    rotated = apply_rotary(qkv[:, :num_rotated], cos, sin)
    write_kv(kv_layer, rotated[:, num_heads:], qkv[:, num_rotated:], slot_mapping)
    return rotated[:, :num_heads].contiguous()


def check_rope_shapes(qkv: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> int:
    """Return the number of query heads.

    Raises:
        ShapeError: The arguments of `rope_kv_write` do not fit together.
    """
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_heads = num_all_heads - 2 * kv_layer.shape[2]
    if num_heads < 1 or head_dim != kv_layer.shape[4] or head_dim % 2:
        raise ShapeError(
            f"{num_all_heads} heads of {head_dim} hold no keys and values for a pool of "
            f"{kv_layer.shape[2]} heads of {kv_layer.shape[4]}"
        )
    if slot_mapping.shape != (num_tokens,):
        raise ShapeError(f"{num_tokens} tokens cannot have {[*slot_mapping.shape]} slots")
    if qkv.dtype is not kv_layer.dtype:
        raise ShapeError(f"a {kv_layer.dtype} pool cannot take {qkv.dtype}")
    return num_heads
