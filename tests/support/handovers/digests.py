"""A digest of whole blocks that a GPU computes as fast as it reads, and a CPU gets the same.

Words of 8 bytes, each times an odd number of its own, are added modulo 2^64.  Whatever one word
changes to, the digest changes; that several changes cancel each other has a chance of 2^-60 or so.
Sums of integers do not depend on their order, so both sides get the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from shared.kv.layout import KVLayout

WORD_BYTES = 8
SEED = 11
"""Both sides multiply by the same numbers."""


def words_of(kv: Tensor) -> Tensor:
    """Return a pool as [num_blocks, num_words] int64, over the same memory."""
    return kv.view(kv.shape[0], -1).view(torch.int64)


def digest_factors(layout: KVLayout, device: torch.device) -> Tensor:
    """Return [num_words] odd int64 numbers, on a device.

    Raises:
        ValueError: A block is not whole words.
    """
    num_words, rest = divmod(layout.block_bytes, WORD_BYTES)
    if rest:
        raise ValueError(f"a block of {layout.block_bytes} bytes is not whole words of 8")
    generator = torch.Generator().manual_seed(SEED)
    factors = torch.empty(num_words, dtype=torch.int64)
    factors.random_(-(1 << 62), 1 << 62, generator=generator)
    return (2 * factors + 1).to(device)


def block_digests(words: Tensor, block_ids: Tensor, factors: Tensor) -> Tensor:
    """Return [num_blocks] int64, the digests of some blocks; enqueued on the current stream.

    Args:
        words: What `words_of` returned.
        block_ids: [num_blocks] int64 on the same device.
        factors: What `digest_factors` returned.
    """
    return (words.index_select(0, block_ids) * factors).sum(dim=1)
