"""A pool's part of STATUS."""

from __future__ import annotations

from protocol.codec import validate
from protocol.messages import Status
from shared.daemon.status import pool_status
from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.layout import KVLayout

LAYOUT = KVLayout(
    num_blocks=8, num_layers=2, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32"
)


def test_a_pool_is_told_by_state_and_adds_up() -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(4)
    allocator.move(blocks[:2], BlockState.LEASED)
    allocator.move(blocks[:1], BlockState.QUARANTINED)
    status = pool_status(allocator, LAYOUT)
    assert status == {
        "total": 8,
        "reserved": 1,
        "free": 3,
        "cached": 0,
        "active": 2,
        "leased": 1,
        "quarantined": 1,
        "block_size": 4,
        "block_bytes": 4 * 2 * 2 * 4 * 4,
    }
    validate(Status(status={"pool": status}))
