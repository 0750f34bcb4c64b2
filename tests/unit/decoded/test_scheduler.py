"""Continuous batching: room is promised before it is used."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoded.scheduler import Room, Scheduler
from shared.kv.allocator import BlockAllocator


@dataclass(eq=False)
class Sequence:
    blocks: list[int]
    num_in_flight: int = 0
    wants_step: bool = True


def make(num_free: int = 10, max_batch: int = 3) -> tuple[Scheduler[Sequence], BlockAllocator]:
    allocator = BlockAllocator(num_free + 1)
    return Scheduler(allocator=allocator, max_batch=max_batch), allocator


def test_a_reservation_takes_blocks_and_a_place() -> None:
    scheduler, _ = make()
    blocks = scheduler.reserve(4)
    assert blocks is not None
    assert len(blocks) == 4
    assert scheduler.room == Room(free_blocks=6, free_sequences=2)
    assert (scheduler.num_reserved, scheduler.num_running) == (1, 0)


@pytest.mark.parametrize(("num_free", "max_batch", "wanted"), [(3, 3, 4), (10, 0, 1)])
def test_without_blocks_or_a_place_nothing_is_taken(
    num_free: int, max_batch: int, wanted: int
) -> None:
    scheduler, _ = make(num_free, max_batch)
    before = scheduler.room
    assert scheduler.reserve(wanted) is None
    assert scheduler.room == before


def test_a_running_sequence_keeps_its_place_until_it_ends() -> None:
    """Whatever was adopted can also finish, so its place is not promised again."""
    scheduler, allocator = make(max_batch=1)
    blocks = scheduler.reserve(2)
    assert blocks is not None
    scheduler.start(sequence := Sequence(blocks))
    assert (scheduler.num_reserved, scheduler.num_running) == (0, 1)
    assert scheduler.reserve(1) is None
    scheduler.finish(sequence)
    assert scheduler.room == Room(free_blocks=10, free_sequences=1)
    allocator.check_integrity()


def test_blocks_are_free_once_no_step_writes_them() -> None:
    """A sequence may end while a step that it was launched in is running."""
    scheduler, allocator = make()
    sequence = Sequence(scheduler.reserve(4) or [])
    scheduler.start(sequence)
    for _ in range(2):
        scheduler.launched([sequence])
    scheduler.collected([sequence])
    scheduler.finish(sequence)
    assert (scheduler.next_batch(), scheduler.num_running) == ([], 0)
    assert scheduler.room == Room(free_blocks=6, free_sequences=3)
    scheduler.collected([sequence])
    assert scheduler.room == Room(free_blocks=10, free_sequences=3)
    allocator.check_integrity()


def test_who_has_no_token_left_to_launch_is_left_out() -> None:
    scheduler, _ = make()
    sequence = Sequence(scheduler.reserve(1) or [])
    scheduler.start(sequence)
    sequence.wants_step = False
    assert scheduler.next_batch() == []


def test_what_no_sequence_started_on_is_given_back() -> None:
    scheduler, allocator = make()
    blocks = scheduler.reserve(10)
    assert blocks is not None
    scheduler.unreserve(blocks)
    assert scheduler.room == Room(free_blocks=10, free_sequences=3)
    allocator.check_integrity()


def test_a_batch_is_everyone_who_runs_in_the_order_of_their_start() -> None:
    scheduler, _ = make()
    sequences = [Sequence(scheduler.reserve(1) or []) for _ in range(3)]
    for sequence in reversed(sequences):
        scheduler.start(sequence)
    assert scheduler.next_batch() == sequences[::-1]
    scheduler.finish(sequences[1])
    assert scheduler.next_batch() == [sequences[2], sequences[0]]


def test_a_batch_does_not_change_under_a_running_step() -> None:
    scheduler, _ = make()
    scheduler.start(sequence := Sequence(scheduler.reserve(1) or []))
    batch = scheduler.next_batch()
    scheduler.finish(sequence)
    assert batch == [sequence]


@given(
    actions=st.lists(st.tuples(st.sampled_from("rusf"), st.integers(0, 6)), max_size=40),
    max_batch=st.integers(1, 4),
)
def test_room_always_adds_up(actions: list[tuple[str, int]], max_batch: int) -> None:
    """Blocks and places are free, reserved or running, and never two of these."""
    scheduler, allocator = make(12, max_batch)
    reserved: list[list[int]] = []
    running: list[Sequence] = []
    for name, number in actions:
        if name == "r" and (blocks := scheduler.reserve(number)) is not None:
            reserved.append(blocks)
        elif name == "u" and reserved:
            scheduler.unreserve(reserved.pop())
        elif name == "s" and reserved:
            running.append(Sequence(reserved.pop()))
            scheduler.start(running[-1])
        elif name == "f" and running:
            scheduler.finish(running.pop(0))
        used = sum(map(len, reserved)) + sum(len(sequence.blocks) for sequence in running)
        assert scheduler.room.free_blocks == 12 - used
        assert scheduler.room.free_sequences == max_batch - len(reserved) - len(running) >= 0
        allocator.check_integrity()
