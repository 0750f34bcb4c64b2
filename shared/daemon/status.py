"""The parts of STATUS that both daemons tell in the same words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.kv.allocator import BlockAllocator
    from shared.kv.layout import KVLayout


def pool_status(allocator: BlockAllocator, layout: KVLayout) -> dict[str, object]:
    """Return a pool's blocks by state, which add up to `total`, and what a block is."""
    return dataclasses.asdict(allocator.counts()) | {
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
    }
