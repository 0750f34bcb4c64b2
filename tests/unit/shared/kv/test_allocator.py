"""Tests of shared/kv/allocator.py."""

from __future__ import annotations

from itertools import product

import pytest

from shared.kv.allocator import (
    LEGAL_MOVES,
    STATE_CODES,
    BlockAllocator,
    BlockCounts,
    BlockState,
)
from shared.kv.errors import (
    BlockMoveError,
    IntegrityError,
    OutOfBlocksError,
    RepeatedBlockError,
    UnknownBlockError,
)

PATHS: dict[BlockState, list[BlockState]] = {
    BlockState.ACTIVE: [],
    BlockState.CACHED: [BlockState.CACHED],
    BlockState.LEASED: [BlockState.LEASED],
    BlockState.QUARANTINED: [BlockState.LEASED, BlockState.QUARANTINED],
    BlockState.FREE: [BlockState.FREE],
}
"""The moves that lead an allocated block into each state."""


def allocator_with_block_in(state: BlockState) -> tuple[BlockAllocator, int]:
    """Return an allocator and a block of it that is in `state`."""
    allocator = BlockAllocator(4)
    if state is BlockState.RESERVED:
        return allocator, 0
    (block,) = allocator.allocate(1)
    for step in PATHS[state]:
        allocator.move([block], step)
    return allocator, block


def test_block_zero_is_never_handed_out() -> None:
    """The proof at hand-shake overwrites it."""
    allocator = BlockAllocator(8)
    assert sorted(allocator.allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.state(0) is BlockState.RESERVED


def test_a_pool_without_a_usable_block_is_refused() -> None:
    """One block is the reserved one."""
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockAllocator(1)


def test_fresh_blocks_come_in_ascending_order() -> None:
    """Neighbouring blocks are copied in one piece."""
    assert BlockAllocator(8).allocate(3) == [1, 2, 3]


def test_freed_blocks_are_reused_first_and_in_their_order() -> None:
    """The pages touched already are used again, so a pool never grows beyond its load."""
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(3)
    allocator.free(blocks)
    assert allocator.allocate(4) == [1, 2, 3, 4]


def test_too_large_an_allocation_takes_nothing() -> None:
    """A request waits whole; it never holds half of what it needs."""
    allocator = BlockAllocator(8)
    allocator.allocate(5)
    with pytest.raises(OutOfBlocksError, match="3 blocks were asked for, 2 of 8 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert allocator.counts().active == 5


def test_allocating_nothing_is_nothing_and_less_is_refused() -> None:
    """A negative number would cut the free list from the wrong end."""
    allocator = BlockAllocator(4)
    assert allocator.allocate(0) == []
    with pytest.raises(ValueError, match="num_blocks is -1"):
        allocator.allocate(-1)


def test_counts_add_up_and_name_every_state() -> None:
    """These are the numbers of `kvpair status`."""
    allocator = BlockAllocator(16)
    blocks = allocator.allocate(10)
    allocator.move(blocks[:4], BlockState.LEASED)
    allocator.move(blocks[:1], BlockState.QUARANTINED)
    allocator.move(blocks[4:6], BlockState.CACHED)
    assert allocator.counts() == BlockCounts(
        total=16, reserved=1, free=5, cached=2, active=4, leased=3, quarantined=1
    )
    assert repr(allocator) == (
        "<BlockAllocator 16 blocks: "
        "1 reserved, 5 free, 2 cached, 4 active, 3 leased, 1 quarantined>"
    )
    assert allocator.num_blocks == 16


@pytest.mark.parametrize(("state", "to"), [*product(BlockState, BlockState)])
def test_a_move_happens_exactly_where_the_table_allows_it(
    state: BlockState, to: BlockState
) -> None:
    """The table is the rule; the code must add none and drop none."""
    allocator, block = allocator_with_block_in(state)
    before = allocator.counts()
    if to in LEGAL_MOVES[state]:
        allocator.move([block], to)
        assert allocator.state(block) is to
    else:
        message = f"block {block} is {state.value} and cannot become {to.value}"
        with pytest.raises(BlockMoveError, match=message):
            allocator.move([block], to)
        assert allocator.state(block) is state
        assert allocator.counts() == before
    allocator.check_integrity()


def test_a_double_free_names_the_block_and_changes_nothing() -> None:
    """The block may be another request's by now."""
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(3)
    allocator.free([2])
    with pytest.raises(BlockMoveError, match="block 2 is free and cannot become free"):
        allocator.free(blocks)
    assert [allocator.state(block) for block in (1, 3)] == [BlockState.ACTIVE] * 2
    allocator.check_integrity()


@pytest.mark.parametrize("block", [-1, 8, 1 << 40])
def test_a_foreign_block_is_refused_and_changes_nothing(block: int) -> None:
    """A negative id must not count from the end of the pool."""
    allocator = BlockAllocator(8)
    (own,) = allocator.allocate(1)
    with pytest.raises(UnknownBlockError, match=f"block {block} is not in a pool of 8 blocks"):
        allocator.free([own, block])
    assert allocator.state(own) is BlockState.ACTIVE


def test_a_block_named_twice_in_one_call_is_refused() -> None:
    """It would be on the free list twice, and then in two hands."""
    allocator = BlockAllocator(8)
    allocator.allocate(2)
    with pytest.raises(RepeatedBlockError, match=r"block 1 \(active\) is named twice"):
        allocator.free([1, 2, 1])
    assert allocator.counts().active == 2


def test_a_block_that_was_counted_wrongly_is_found() -> None:
    """The check counts anew instead of trusting the counters."""
    allocator = BlockAllocator(8)
    allocator.allocate(2)
    allocator._codes[1] = STATE_CODES[BlockState.LEASED]
    with pytest.raises(IntegrityError, match="the books say"):
        allocator.check_integrity()


def test_a_block_lost_from_the_free_list_is_found() -> None:
    """Counters that agree do not prove that the block can be handed out."""
    allocator = BlockAllocator(8)
    allocator._free[0] = allocator._free[1]
    with pytest.raises(IntegrityError, match=r"differs by \[7\]"):
        allocator.check_integrity()
