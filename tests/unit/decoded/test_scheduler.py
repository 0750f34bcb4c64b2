"""Continuous batching: blocks are taken as they are needed, and who came last makes room."""

from __future__ import annotations

import pytest

from decoded.credits import Room
from decoded.scheduler import Scheduler
from decoded.swap_book import AfterCopy
from shared.kv.allocator import BlockAllocator
from tests.unit.decoded.batches import FakeSequence


class Batch:
    """A scheduler over a pool and an arena of so many free blocks."""

    def __init__(self, num_free: int = 10, max_batch: int = 3, num_arena: int = 10) -> None:
        self.pool = BlockAllocator(num_free + 1)
        self.arena = BlockAllocator(num_arena + 1) if num_arena else None
        self.scheduler: Scheduler[FakeSequence] = Scheduler(
            allocator=self.pool, max_batch=max_batch, arena=self.arena
        )

    def start(self, num_blocks: int, *, num_tokens: int = 0) -> FakeSequence:
        """Start a sequence; full blocks make its next step need another."""
        blocks = self.scheduler.reserve(num_blocks)
        assert blocks is not None
        sequence = FakeSequence(blocks, num_tokens)
        self.scheduler.start(sequence)
        return sequence

    def start_full(self, num_blocks: int) -> FakeSequence:
        return self.start(num_blocks, num_tokens=4 * num_blocks)

    def step(self) -> list[FakeSequence]:
        """Take a step to its end."""
        batch = self.scheduler.next_batch()
        self.scheduler.launched(batch)
        self.scheduler.collected(batch)
        for sequence in batch:
            sequence.num_tokens += 1
        return batch

    def copy_all(self) -> list[AfterCopy]:
        """Copy whatever is to be copied now."""
        swaps = self.scheduler.next_swaps(100)
        return [self.scheduler.swap_done(swap) for swap in swaps]

    def check(self) -> None:
        self.pool.check_integrity()
        if self.arena is not None:
            self.arena.check_integrity()


# --- room --------------------------------------------------------------------------------------


def test_a_reservation_takes_blocks_and_a_place() -> None:
    """One more block is spared for it, which it needs when it grows."""
    scheduler = Batch().scheduler
    blocks = scheduler.reserve(4)
    assert blocks is not None
    assert len(blocks) == 4
    assert scheduler.room == Room(free_blocks=5, free_sequences=2)
    assert (scheduler.num_reserved, scheduler.num_running) == (1, 0)


@pytest.mark.parametrize(("num_free", "max_batch", "wanted"), [(3, 3, 4), (10, 0, 1)])
def test_without_blocks_or_a_place_nothing_is_taken(
    num_free: int, max_batch: int, wanted: int
) -> None:
    scheduler = Batch(num_free, max_batch).scheduler
    before = scheduler.room
    assert scheduler.reserve(wanted) is None
    assert scheduler.room == before


def test_what_was_told_can_be_taken_by_several_at_once() -> None:
    """Each makes the spare blocks one more; held against the last it would be rejected for it."""
    scheduler = Batch(10).scheduler
    scheduler.reserve(1)
    told = scheduler.room.free_blocks
    assert told == 8
    assert scheduler.reserve(told // 2) is not None
    assert scheduler.reserve(told - told // 2) is not None


def test_a_running_sequence_keeps_its_place_until_it_ends() -> None:
    batch = Batch(max_batch=1)
    sequence = batch.start(2)
    assert (batch.scheduler.num_reserved, batch.scheduler.num_running) == (0, 1)
    assert batch.scheduler.reserve(1) is None
    batch.scheduler.finish(sequence)
    assert batch.scheduler.room == Room(free_blocks=10, free_sequences=1)
    batch.check()


def test_what_no_sequence_started_on_is_given_back() -> None:
    batch = Batch()
    blocks = batch.scheduler.reserve(10)
    assert blocks is not None
    batch.scheduler.unreserve(blocks)
    assert batch.scheduler.room == Room(free_blocks=10, free_sequences=3)
    batch.check()


# --- steps -------------------------------------------------------------------------------------


def test_blocks_are_free_once_no_step_writes_them() -> None:
    """A sequence may end while a step that it was launched in is running."""
    batch = Batch()
    sequence = batch.start(4)
    for _ in range(2):
        batch.scheduler.launched([sequence])
    batch.scheduler.collected([sequence])
    batch.scheduler.finish(sequence)
    assert (batch.scheduler.next_batch(), batch.scheduler.num_running) == ([], 0)
    assert batch.scheduler.room == Room(free_blocks=6, free_sequences=3)
    batch.scheduler.collected([sequence])
    assert batch.scheduler.room == Room(free_blocks=10, free_sequences=3)
    batch.check()


def test_who_has_no_token_left_to_launch_is_left_out() -> None:
    """Nor does it take a block that it would not write."""
    batch = Batch()
    sequence = batch.start_full(1)
    sequence.max_tokens = 4
    assert batch.scheduler.next_batch() == []
    assert len(sequence.blocks) == 1


def test_a_batch_is_everyone_who_runs_in_the_order_of_adoption() -> None:
    """Not of their start: a short prompt is pulled sooner than a long one before it."""
    batch = Batch()
    for number in (2, 3, 1):
        sequence = FakeSequence(batch.scheduler.reserve(1) or [], adopted_ns=number)
        batch.scheduler.start(sequence)
    assert [each.adopted_ns for each in batch.scheduler.next_batch()] == [1, 2, 3]


def test_a_batch_does_not_change_under_a_running_step() -> None:
    batch = Batch()
    sequence = batch.start(1)
    running = batch.scheduler.next_batch()
    batch.scheduler.finish(sequence)
    assert running == [sequence]


def test_a_block_is_taken_when_the_next_token_needs_it() -> None:
    """And the table is another one then: engines tell tables apart by identity."""
    batch = Batch()
    sequence = batch.start(1)
    tables = []
    for _ in range(9):
        assert batch.step() == [sequence]
        tables.append(sequence.blocks)
    assert [len(table) for table in tables] == [1] * 4 + [2] * 4 + [3]
    assert len({id(table) for table in tables}) == 3


def test_steps_in_flight_count_where_a_block_is_needed() -> None:
    """The step behind the running one writes the place after its."""
    batch = Batch()
    sequence = batch.start(1, num_tokens=3)
    batch.scheduler.launched(batch.scheduler.next_batch())
    assert len(sequence.blocks) == 1
    batch.scheduler.next_batch()
    assert len(sequence.blocks) == 2


# --- who makes room ----------------------------------------------------------------------------


def test_who_was_adopted_last_makes_room_and_comes_back() -> None:
    batch = Batch(5)
    old, young = batch.start_full(3), batch.start(2)
    batch.scheduler.launched([young])
    assert batch.scheduler.next_batch() == []
    assert batch.scheduler.swapped == (young,)
    assert batch.scheduler.next_swaps(100) == [], "a step still writes its blocks"
    batch.scheduler.collected([young])
    assert batch.copy_all() == [AfterCopy.IS_OUT]
    assert batch.step() == [old]
    assert (young.blocks, len(old.blocks)) == ([], 4)
    assert batch.scheduler.take_preempted() == [young]
    assert batch.copy_all() == [], "its two blocks and a spare one for each are not free"
    batch.scheduler.finish(old)
    assert batch.copy_all() == [AfterCopy.IS_BACK]
    assert batch.step() == [young]
    assert len(young.blocks) == 2
    batch.scheduler.finish(young)
    assert batch.scheduler.room == Room(free_blocks=5, free_sequences=3)
    batch.check()


def test_only_as_many_go_as_make_the_room_that_lacks() -> None:
    """One that has four blocks makes room for two that lack one each."""
    batch = Batch(8)
    first, second, third = batch.start_full(2), batch.start_full(2), batch.start(4)
    assert batch.scheduler.next_batch() == []
    assert batch.scheduler.swapped == (third,)
    assert batch.copy_all() == [AfterCopy.IS_OUT]
    assert batch.scheduler.next_batch() == [first, second]


def test_who_lacks_a_block_and_is_the_youngest_goes_itself() -> None:
    batch = Batch(4)
    old, young = batch.start(2), batch.start_full(2)
    assert batch.step() == [old]
    assert batch.scheduler.swapped == (young,)


def test_nobody_makes_room_for_a_younger_one_and_the_oldest_for_nobody() -> None:
    """However large it is: what was adopted first also finishes."""
    batch = Batch(6)
    old, young = batch.start(5), batch.start_full(1)
    assert batch.step() == [old]
    assert batch.scheduler.swapped == (young,)
    batch.copy_all()
    assert batch.step() == [old]
    assert batch.scheduler.num_running == 1


def test_the_oldest_waits_for_a_block_that_is_only_reserved() -> None:
    """Its turn comes when the reserved sequence has started and can make room."""
    batch = Batch(4)
    old, reserved = batch.start_full(2), batch.scheduler.reserve(2)
    assert batch.scheduler.next_batch() == []
    batch.scheduler.start(young := FakeSequence(reserved or []))
    assert batch.step() == [young] or batch.scheduler.swapped == (young,)
    assert batch.copy_all() == [AfterCopy.IS_OUT]
    assert batch.step() == [old]


def test_blocks_that_come_free_anyway_are_waited_for() -> None:
    batch = Batch(6)
    old, ending, young = batch.start_full(2), batch.start(2), batch.start(2)
    batch.scheduler.launched([ending])
    batch.scheduler.finish(ending)
    assert batch.scheduler.next_batch() == [young]
    batch.scheduler.collected([ending])
    assert batch.scheduler.next_batch() == [old, young]
    assert batch.scheduler.take_preempted() == []


def test_who_fits_the_arena_goes_before_who_is_younger_and_does_not() -> None:
    batch = Batch(8, num_arena=2)
    _, middle, young = batch.start_full(2), batch.start(2), batch.start(4)
    assert batch.scheduler.next_batch() == [young]
    assert batch.scheduler.swapped == (middle,)
    assert batch.scheduler.dropped == ()


@pytest.mark.parametrize("num_arena", [0, 1])
def test_where_no_arena_has_room_the_youngest_is_given_up(num_arena: int) -> None:
    batch = Batch(4, num_arena=num_arena)
    old, young = batch.start_full(2), batch.start(2)
    assert batch.scheduler.next_batch() == []
    assert batch.scheduler.dropped == (young,)
    batch.scheduler.finish(young)
    assert batch.scheduler.dropped == ()
    assert batch.step() == [old]
    assert batch.scheduler.num_running == 1


@pytest.mark.parametrize("num_arena", [0, 10])
def test_a_sequence_that_outgrows_the_whole_pool_is_given_up(num_arena: int) -> None:
    """It was moved in from a larger pool: out and back it would go, for ever."""
    batch = Batch(4, num_arena=num_arena)
    alone = batch.start_full(4)
    assert batch.scheduler.next_batch() == []
    assert batch.scheduler.dropped == (alone,)


def test_while_somebody_is_out_nobody_new_is_let_in() -> None:
    """What was adopted first comes first; its place in the batch is kept."""
    batch = Batch(6)
    old, young = batch.start_full(2), batch.start(4)
    batch.scheduler.next_batch()
    batch.copy_all()
    assert batch.pool.num_free == 4
    assert batch.scheduler.room == Room(free_blocks=0, free_sequences=1)
    assert batch.scheduler.reserve(1) is None
    batch.scheduler.finish(old)
    batch.copy_all()
    assert batch.scheduler.swapped == ()
    assert batch.scheduler.room == Room(free_blocks=1, free_sequences=2)
    assert batch.scheduler.next_batch() == [young]


def test_the_oldest_comes_back_first_and_nobody_overtakes_it() -> None:
    """A small one would fit at once, and would go on taking what the large one waits for."""
    batch = Batch(12)
    first, large, small = batch.start_full(5), batch.start(5), batch.start(2)
    batch.scheduler.next_batch()
    batch.copy_all()
    assert batch.scheduler.swapped == (small,)
    large.num_tokens = 20
    assert batch.step() == [first, large]
    first.num_tokens = 24
    batch.scheduler.next_batch()
    batch.copy_all()
    assert batch.step() == [first]
    assert batch.scheduler.swapped == (small, large)
    assert (batch.pool.num_free, batch.copy_all()) == (5, [])
    batch.scheduler.finish(first)
    assert batch.copy_all() == [AfterCopy.IS_BACK, AfterCopy.IS_BACK]
    assert batch.scheduler.next_batch() == [large, small]


def test_who_is_moved_in_is_not_preempted_meanwhile() -> None:
    """The blocks that are being filled for it would have to be copied before they are."""
    batch = Batch(4)
    _, young = batch.start_full(2), batch.start(2)
    young.is_moving = True
    assert batch.scheduler.next_batch() == [young]
    assert batch.scheduler.swapped == ()


def test_who_is_on_the_way_back_is_left_room_to_grow() -> None:
    """Three small ones that come back at once would else fill the pool, and one would go again."""
    batch = Batch(7)
    small = [batch.start(2) for _ in range(3)]
    for sequence in small:
        assert batch.scheduler.move_out(sequence, 0) == []
    batch.copy_all()
    for sequence in small:
        batch.scheduler.moved_out(sequence, [])
    swaps = batch.scheduler.next_swaps(100)
    assert [len(swap.targets) for swap in swaps] == [2, 2]
    assert batch.pool.num_free == 3


# --- ends --------------------------------------------------------------------------------------


def test_a_sequence_that_ends_while_it_is_out_gives_everything_back() -> None:
    batch = Batch(4)
    left: list[FakeSequence] = []
    batch.scheduler.on_left = left.append
    old, young = batch.start_full(2), batch.start(2)
    batch.scheduler.next_batch()
    batch.copy_all()
    batch.scheduler.finish(young)
    assert left == [young]
    batch.scheduler.finish(old)
    assert batch.scheduler.room == Room(free_blocks=4, free_sequences=3)
    batch.check()
    assert batch.arena is not None
    assert batch.arena.num_free == 10


@pytest.mark.parametrize("is_out", [True, False])
def test_blocks_under_a_copy_are_free_once_it_is_over(is_out: bool) -> None:
    batch = Batch(4)
    left: list[FakeSequence] = []
    batch.scheduler.on_left = left.append
    old, young = batch.start_full(2), batch.start(2)
    batch.scheduler.next_batch()
    if not is_out:
        batch.copy_all()
        batch.scheduler.finish(old)
    (swap,) = batch.scheduler.next_swaps(100)
    assert swap.is_out == is_out
    left.clear()
    batch.scheduler.finish(young)
    assert (left, batch.pool.num_free) == ([], 0 if is_out else 2)
    assert batch.scheduler.swap_done(swap) is AfterCopy.HAS_ENDED
    assert left == [young]
    assert batch.arena is not None
    assert batch.arena.num_free == 10
    batch.check()


# --- what is moved out with blocks that it has elsewhere ---------------------------------------


def test_what_was_read_elsewhere_comes_back_before_its_own_blocks() -> None:
    batch = Batch(8)
    sequence = batch.start(2)
    places = batch.scheduler.move_out(sequence, 3)
    assert places is not None
    assert batch.scheduler.num_running == 0
    assert batch.copy_all() == [AfterCopy.IS_OUT]
    assert batch.copy_all() == [], "it is held"
    batch.scheduler.moved_out(sequence, places)
    (swap,) = batch.scheduler.next_swaps(100)
    assert (swap.sources[:3], len(swap.sources)) == (places, 5)
    assert batch.scheduler.swap_done(swap) is AfterCopy.IS_BACK
    assert sequence.blocks == swap.targets
    assert batch.arena is not None
    assert batch.arena.num_free == 10


def test_who_was_coming_back_is_recalled() -> None:
    """Its blocks in the peer's pool must be copied first, and the arena has its own still."""
    batch = Batch(8)
    sequence = batch.start(2)
    places = batch.scheduler.move_out(sequence, 1)
    assert places is not None
    batch.copy_all()
    batch.scheduler.moved_out(sequence, places)
    (swap,) = batch.scheduler.next_swaps(100)
    more = batch.scheduler.move_out(sequence, 1)
    assert more is not None
    assert batch.scheduler.swap_done(swap) is AfterCopy.IS_OUT
    assert (sequence.blocks, batch.pool.num_free) == ([], 8)
    batch.scheduler.finish(sequence)
    batch.scheduler.free_places(more)
    assert batch.arena is not None
    assert batch.arena.num_free == 10
    batch.check()


def test_without_room_in_the_arena_nothing_is_moved_out() -> None:
    batch = Batch(8, num_arena=4)
    sequence = batch.start(2)
    assert batch.scheduler.move_out(sequence, 3) is None
    assert batch.scheduler.num_running == 1


def test_a_large_sequence_is_copied_in_parts() -> None:
    """On a CPU a step waits for the copies of its turn."""
    batch = Batch(8)
    batch.start_full(3)
    young = batch.start(5)
    batch.scheduler.next_batch()
    outcomes = []
    while swaps := batch.scheduler.next_swaps(2):
        (swap,) = swaps
        assert len(swap.sources) <= 2
        outcomes.append(batch.scheduler.swap_done(swap))
    assert outcomes == [AfterCopy.GOES_ON, AfterCopy.GOES_ON, AfterCopy.IS_OUT]
    assert young.blocks == []
