"""Tests of shared/kv/holds.py."""

from __future__ import annotations

import pytest

from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.block_hashes import block_hashes
from shared.kv.errors import HoldStateError, IntegrityError
from shared.kv.holds import BlockHolds, CacheUse, Hold

BLOCK_SIZE = 4
NUM_USABLE = 9
ACTIVE, LEASED, QUARANTINED = BlockState.ACTIVE, BlockState.LEASED, BlockState.QUARANTINED
CACHED, FREE = BlockState.CACHED, BlockState.FREE


class Pool:
    """A pool of 9 blocks of 4 tokens beside the reserved one."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(NUM_USABLE + 1)
        self.holds = BlockHolds(self.allocator, block_size=BLOCK_SIZE)

    def try_take(self, tokens: list[int]) -> Hold | None:
        hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=b"")
        return self.holds.take(len(tokens), hashes)

    def take(self, tokens: list[int]) -> Hold:
        """Take blocks for a prompt, of which nothing is computed but what was found."""
        hold = self.try_take(tokens)
        assert hold is not None
        return hold

    def compute(self, tokens: list[int]) -> Hold:
        """Take blocks for a prompt and compute it."""
        hold = self.take(tokens)
        self.holds.computed(hold, len(tokens))
        return hold

    def states(self, hold: Hold) -> list[BlockState]:
        self.holds.check_integrity()
        return [self.allocator.state(block) for block in hold.blocks]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def prompt(num_tokens: int, last: int = 0) -> list[int]:
    """Return a prompt; two that differ in `last` have all but their last token in common."""
    return [*range(100, 99 + num_tokens), last]


# --- what is shared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_shared"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_at_least_the_last_token_is_computed_into_a_block_of_its_own(
    pool: Pool, num_tokens: int, num_shared: int
) -> None:
    """Somebody has to sample from its logits, and nobody may write a shared block."""
    first, second = pool.compute(prompt(num_tokens)), pool.compute(prompt(num_tokens))
    assert second.cached_tokens == num_shared * BLOCK_SIZE
    assert second.blocks[:num_shared] == first.blocks[:num_shared]
    assert not set(second.blocks[num_shared:]) & set(first.blocks)
    assert len(second.blocks) == len(first.blocks)


def test_blocks_are_shared_from_when_they_are_computed(pool: Pool) -> None:
    """Not from when they were allocated: whoever shares them reads them at once."""
    first = pool.take(prompt(12))
    assert pool.take(prompt(12, last=1)).cached_tokens == 0
    pool.holds.computed(first, 7)
    hashes = first.hashes
    assert pool.holds.cached_tokens(12, hashes) == 4
    pool.holds.computed(first, 8)
    assert pool.holds.cached_tokens(12, hashes) == 8


def test_blocks_outlive_the_request_that_computed_them(pool: Pool) -> None:
    first = pool.compute(prompt(11))
    pool.holds.drop(first)
    assert pool.states(first) == [CACHED, CACHED, FREE]
    second = pool.compute(prompt(13))
    assert second.blocks[:2] == first.blocks[:2]
    assert pool.states(second) == [ACTIVE] * 4


def test_without_hashes_nothing_is_shared_or_kept(pool: Pool) -> None:
    """That is the prefix cache switched off."""
    hold = pool.holds.take(9)
    assert hold is not None
    pool.holds.computed(hold, 9)
    pool.holds.drop(hold)
    assert pool.states(hold) == [FREE] * 3
    assert pool.allocator.num_free == NUM_USABLE


def test_a_content_that_was_computed_twice_is_kept_once(pool: Pool) -> None:
    first, second = pool.take(prompt(9)), pool.take(prompt(9))
    pool.holds.computed(first, 9)
    pool.holds.computed(second, 9)
    pool.holds.drop(second)
    assert pool.states(second) == [FREE] * 3
    pool.holds.drop(first)
    assert pool.states(first) == [CACHED, CACHED, FREE]


# --- eviction ------------------------------------------------------------------------------------


def test_idle_blocks_make_room_the_oldest_first(pool: Pool) -> None:
    old, new = pool.compute([1] * 8), pool.compute([2] * 8)
    pool.holds.drop(old)
    pool.holds.drop(new)
    large = pool.take([3] * 24)
    assert large.cached_tokens == 0
    assert pool.states(old) == [CACHED, ACTIVE]
    assert pool.states(new) == [CACHED, CACHED]
    assert pool.holds.cache_use.evicted_blocks == 1


def test_the_end_of_a_prefix_goes_before_its_beginning(pool: Pool) -> None:
    """More prompts have the beginning in common, and without it the end is of no use."""
    old = pool.compute([1] * 12)
    pool.holds.drop(old)
    pool.take([3] * 28)
    assert pool.states(old) == [CACHED, CACHED, ACTIVE]
    assert pool.holds.cached_tokens(13, old.hashes) == 8


def test_what_a_prompt_shares_is_not_evicted_for_its_own_rest(pool: Pool) -> None:
    first = pool.compute([1] * 8)
    pool.holds.drop(first)
    pool.holds.drop(pool.compute([2] * 16))
    second = pool.take([1] * 36)
    assert second.blocks[:2] == first.blocks
    assert second.cached_tokens == 8
    assert pool.allocator.counts().active == NUM_USABLE


def test_where_too_few_blocks_are_left_nothing_changes(pool: Pool) -> None:
    """Not even what the prompt would share: it waits, and others may need the room."""
    shared = pool.compute([1] * 8)
    pool.holds.drop(shared)
    blocker = pool.take([2] * 4 * 5)
    before = pool.allocator.counts()
    assert pool.try_take([1] * (4 * 4 + 1)) is None
    assert pool.allocator.counts() == before
    assert pool.states(shared) == [CACHED, CACHED]
    pool.holds.drop(blocker)
    assert pool.take([1] * (4 * 4 + 1)).cached_tokens == 8


@pytest.mark.parametrize("path", [[], [LEASED], [LEASED, QUARANTINED]], ids=["0", "1", "2"])
def test_a_held_block_is_not_evicted(pool: Pool, path: list[BlockState]) -> None:
    hold = pool.compute([1] * 4)
    for state in path:
        pool.holds.move(hold, state)
    assert pool.try_take([2] * 4 * NUM_USABLE) is None
    assert pool.take([2] * 4 * (NUM_USABLE - 1)).blocks != hold.blocks
    pool.holds.drop(hold)
    assert pool.states(hold) == [CACHED]


# --- several holders -----------------------------------------------------------------------------


def test_a_block_is_in_the_strongest_state_of_its_holds(pool: Pool) -> None:
    first = pool.compute(prompt(5))
    second, third = pool.compute(prompt(5, last=1)), pool.compute(prompt(5, last=2))
    assert {hold.blocks[0] for hold in (first, second, third)} == {first.blocks[0]}
    pool.holds.move(second, LEASED)
    assert pool.states(first) == [LEASED, ACTIVE]
    pool.holds.move(second, QUARANTINED)
    pool.holds.move(third, LEASED)
    assert pool.states(first) == [QUARANTINED, ACTIVE]
    pool.holds.drop(second)
    assert pool.states(first) == [LEASED, ACTIVE]
    pool.holds.move(third, ACTIVE)
    assert pool.states(first) == [ACTIVE, ACTIVE]
    pool.holds.drop(first)
    assert pool.states(first) == [ACTIVE, FREE]
    pool.holds.drop(third)
    assert pool.states(first) == [CACHED, FREE]


@pytest.mark.parametrize("path", [[], [LEASED], [LEASED, QUARANTINED]], ids=["0", "1", "2"])
def test_a_quarantined_block_may_be_shared(pool: Pool, path: list[BlockState]) -> None:
    """It is only not to be written, and whoever shares it does not write it."""
    first = pool.compute(prompt(5))
    pool.holds.move(first, LEASED)
    pool.holds.move(first, QUARANTINED)
    second = pool.compute(prompt(5))
    for state in path:
        pool.holds.move(second, state)
    assert second.blocks[0] == first.blocks[0]
    assert pool.states(second)[0] is QUARANTINED
    pool.holds.drop(first)
    assert pool.states(second)[0] is (path or [ACTIVE])[-1]


# --- the books -----------------------------------------------------------------------------------


def test_the_use_of_the_cache_is_counted_in_tokens(pool: Pool) -> None:
    pool.compute(prompt(10))
    pool.compute(prompt(11))
    assert pool.holds.cache_use == CacheUse(
        hit_tokens=8, missed_tokens=13, evicted_blocks=0, blocks=2
    )


def test_what_was_not_looked_for_is_not_missed(pool: Pool) -> None:
    """With the cache switched off a rate of hits means nothing, and must not read as 0 %."""
    hold = pool.holds.take(10)
    assert hold is not None
    assert pool.holds.cache_use.missed_tokens == 0


def test_a_hold_ends_once(pool: Pool) -> None:
    hold = pool.compute(prompt(5))
    pool.holds.drop(hold)
    for again in (
        lambda: pool.holds.drop(hold),
        lambda: pool.holds.computed(hold, 5),
        lambda: pool.holds.move(hold, LEASED),
    ):
        with pytest.raises(HoldStateError, match="a hold that is dropped must not become"):
            again()
    assert pool.allocator.counts().cached == 1


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ([], ACTIVE),
        ([], QUARANTINED),
        ([], CACHED),
        ([], FREE),
        ([LEASED], LEASED),
        ([LEASED], FREE),
        ([LEASED, QUARANTINED], ACTIVE),
        ([LEASED, QUARANTINED], LEASED),
    ],
)
def test_a_hold_goes_only_where_it_may(pool: Pool, path: list[BlockState], to: BlockState) -> None:
    hold = pool.take(prompt(5))
    for state in path:
        pool.holds.move(hold, state)
    with pytest.raises(HoldStateError, match=f"must not become {to.value}"):
        pool.holds.move(hold, to)
    assert hold.state is [ACTIVE, *path][-1]


def test_a_hold_has_at_least_one_block(pool: Pool) -> None:
    with pytest.raises(ValueError, match="num_tokens is 0; a hold has at least one block"):
        pool.holds.take(0)


def test_blocks_that_changed_behind_the_books_are_found(pool: Pool) -> None:
    hold = pool.compute([1] * 4)
    pool.holds.check_integrity()
    pool.holds.move(hold, LEASED)
    pool.holds.move(hold, ACTIVE)
    pool.allocator.move(hold.blocks, CACHED)
    with pytest.raises(IntegrityError, match="block 1 is cached, its holds make it active"):
        pool.holds.check_integrity()
    pool.holds._num_holds[ACTIVE][hold.ids] -= 1
    with pytest.raises(IntegrityError, match="block 1 is cached and in the wrong line"):
        pool.holds.check_integrity()
