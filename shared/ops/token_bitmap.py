"""A set of tokens as one bit each: how a prompt's tokens travel to whoever penalises repetition.

A prompt of 131,072 tokens would take 655 kB as a list of ids; the set of them takes 16 kB in a
vocabulary of 128k, however long the prompt is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def bitmap_bytes(vocab_size: int) -> int:
    """Return how long the bitmap of a vocabulary is."""
    return -(-vocab_size // 8)


def pack_tokens(ids: Iterable[int], vocab_size: int) -> bytes:
    """Return the bitmap: bit `id % 8` of byte `id // 8` is set for each id.

    Args:
        ids: Token ids, each below `vocab_size`.
        vocab_size: The model's.
    """
    bitmap = bytearray(bitmap_bytes(vocab_size))
    for token_id in set(ids):
        bitmap[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bitmap)


def unpack_tokens(bitmap: bytes, vocab_size: int, device: torch.device) -> Tensor:
    """Return [vocab_size] bool, whether each token is in the set.

    Raises:
        ShapeError: The bitmap is not as long as the vocabulary's.
    """
    if len(bitmap) != bitmap_bytes(vocab_size):
        raise ShapeError(f"a bitmap of {len(bitmap)} bytes is not one of {vocab_size} tokens")
    # A bytearray, since torch warns about memory that nobody may write.
    packed = torch.frombuffer(bytearray(bitmap), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten()[:vocab_size].bool().to(device)
