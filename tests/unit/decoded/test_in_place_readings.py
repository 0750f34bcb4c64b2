"""What is read in place while sequences end: their last step may still be in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decoded.in_place import InPlaceReadings, Reading
from decoded.scheduler import Scheduler
from decoded.sequence import Sequence
from shared.kv.allocator import BlockAllocator
from tests.unit.decoded.samples import HANDOFF, changed

NUM_FREE = 8


class Lost:
    """One running sequence, two blocks of whose prompt are in the pool of a lost link."""

    def __init__(self) -> None:
        self.arena = BlockAllocator(NUM_FREE + 1)
        self.scheduler: Scheduler[Sequence] = Scheduler(
            allocator=BlockAllocator(NUM_FREE + 1), max_batch=2, arena=self.arena
        )
        self.readings = InPlaceReadings(self.scheduler)
        self.released: list[Reading | None] = []
        self.scheduler.on_left = lambda left: self.released.append(self.readings.left(left))
        self.session: Any = SimpleNamespace(is_lost=True)
        nobody: Any = SimpleNamespace()
        self.sequence, _ = Sequence.adopt(
            changed(HANDOFF, prompt_tokens=40, num_tokens=40),
            stream=nobody,
            token_bytes=lambda _: b"x",
            block_size=16,
            adopted_ns=1,
        )
        self.sequence.settle(self.scheduler.reserve(1) or [], [5, 6])
        self.scheduler.start(self.sequence)
        self.readings.add(
            self.sequence,
            Reading(session=self.session, lease_id=1, slot=0, generation=1, blocks=[5, 6]),
        )
        self.scheduler.launched([self.sequence])

    def fill_pool(self) -> None:
        """Take every block that is free, as others do."""
        assert self.scheduler.allocate(NUM_FREE - 1) is not None

    def end(self) -> None:
        self.sequence.has_ended = True
        self.scheduler.finish(self.sequence)

    def collect(self) -> None:
        self.scheduler.collected([self.sequence])


@pytest.mark.parametrize("is_full", [False, True])
def test_who_ends_while_its_prompt_is_moved_gives_everything_back(*, is_full: bool) -> None:
    """To the pool or to the arena: nothing comes of the copy, and the last step ends the lease."""
    lost = Lost()
    if is_full:
        lost.fill_pool()
    ((session, copy),) = lost.readings.next_copies(10)
    assert copy.is_to_arena == is_full
    lost.end()
    assert lost.readings.copied(session, copy, is_valid=True) is None
    assert lost.released == []
    lost.collect()
    (reading,) = lost.released
    assert reading is not None
    assert not lost.readings.is_reading(session)
    assert lost.arena.num_free == NUM_FREE
    assert lost.scheduler.allocate(1 if is_full else NUM_FREE) is not None


def test_who_has_ended_needs_no_room_and_is_not_given_up_again() -> None:
    """Only the step in flight still reads its prompt."""
    lost = Lost()
    lost.end()
    assert lost.readings.next_copies(10) == []
    assert lost.readings.unmoved(lost.session) == []
    assert lost.readings.is_reading(lost.session)
    lost.collect()
    assert not lost.readings.is_reading(lost.session)
