"""The parts of STATUS that both daemons tell in the same words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.kv.allocator import BlockAllocator
    from shared.kv.layout import KVLayout

R = TypeVar("R")

MAX_REQUESTS_TOLD = 64
"""Requests that STATUS tells one by one: more than a screen shows, and 8 KiB at most."""


def progress_of(requests: Sequence[R], row: Callable[[R], dict[str, object]]) -> dict[str, object]:
    """Return a map of STATUS over single requests: `total` of them, and the first as rows."""
    return {"total": len(requests), "first": [row(each) for each in requests[:MAX_REQUESTS_TOLD]]}


def pool_status(allocator: BlockAllocator, layout: KVLayout) -> dict[str, object]:
    """Return a pool's blocks by state, which add up to `total`, and what a block is."""
    return dataclasses.asdict(allocator.counts()) | {
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
    }
