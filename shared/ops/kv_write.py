"""Writes a step's keys and values into the KV pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

PAD_SLOT = -1
"""The slot of a row that pads a batch to a fixed size: nothing is written for it."""


def write_kv(kv_layer: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Scatter one step's keys and values into one layer of the KV pool, in place.

    A slot is one token's place: `slot = block_id * block_size + position % block_size`.

    Args:
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool;
            0 is keys, 1 is values.
        key: [num_tokens, num_kv_heads, head_dim], pool dtype, after the rotation.
        value: [num_tokens, num_kv_heads, head_dim], pool dtype.
        slot_mapping: [num_tokens] int64, no slot twice.  Rows equal to `PAD_SLOT` are skipped.

    Raises:
        ShapeError: A shape or a dtype is not as above.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    num_tokens = slot_mapping.shape[0]
    if not key.shape == value.shape == (num_tokens, num_kv_heads, head_dim):
        raise ShapeError(
            f"{num_tokens} slots of {num_kv_heads} heads of {head_dim} cannot take keys of shape "
            f"{tuple(key.shape)} and values of shape {tuple(value.shape)}"
        )
    if not key.dtype is value.dtype is kv_layer.dtype:
        raise ShapeError(f"a {kv_layer.dtype} pool cannot take {key.dtype} and {value.dtype}")
    if num_tokens == 1:
        # Decode at batch 1: two plain copies take half the time of two scatters.
        slot = int(slot_mapping)
        if slot != PAD_SLOT:
            block, offset = divmod(slot, block_size)
            token = kv_layer[block, :, :, offset]
            token[0] = key[0]
            token[1] = value[0]
        return
    is_padding = slot_mapping == PAD_SLOT
    if is_padding.any():
        kept = ~is_padding
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    blocks = slot_mapping // block_size
    offsets = slot_mapping - blocks * block_size
    kv_layer[blocks, 0, :, offsets] = key
    kv_layer[blocks, 1, :, offsets] = value
