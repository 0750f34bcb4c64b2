"""Blocks of prefilld's pool that running sequences read where they are: direct access.

    started ──► READING ──sequence has left──► RELEASE
                   │
                   └─link lost─► MOVING ──all copied──► read from our own pool ──► (no lease left)
                                    │                └► swapped out, to come back ──► (the same)
                                    └─ no room within `MOVE_S` ─► the request ends: `prefill-lost`

The generation on the control page is looked at after every step, before its tokens leave: a change
voids them.  When prefilld dies nobody writes its pool any more and reading goes on, but the memory
stays taken until the mapping is closed, and prefilld's successor needs it.  So what is read in
place is then copied, the shortest prompts first: into free blocks of our own pool, while the
sequence runs on; where they lack, or the sequence is swapped out already, into the arena.

A step in flight may still read the old places after a sequence was moved; its lease lasts until the
last such step is collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decoded.lease_effects import BlockCopy

if TYPE_CHECKING:
    from decoded.link import LinkSession
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence

MOVE_S = 0.8
"""From the loss of the link until nothing is read in place any more: the successor's allocation
waits for it, and a second is promised."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What one sequence reads in place, and under which lease."""

    session: LinkSession
    lease_id: int
    slot: int
    generation: int
    blocks: list[int]
    """The peer's, in the order of the prompt."""
    targets: list[int] = field(default_factory=list)
    """Where they are being moved to: blocks of our pool, or places in the arena."""
    is_to_arena: bool = False
    num_copied: int = 0
    is_copying: bool = False
    num_old_steps: int | None = None
    """Steps in flight that still read the old places; None before everything was moved."""
    has_left: bool = False
    """Its sequence has ended; only a copy on its way keeps it."""


class InPlaceReadings:
    """All sequences that read in place.

    Args:
        scheduler: Has the room that they are moved to.
    """

    def __init__(self, scheduler: Scheduler[Sequence]) -> None:
        self._scheduler = scheduler
        self._readings: dict[Sequence, Reading] = {}

    def add(self, sequence: Sequence, reading: Reading) -> None:
        """A sequence begins to read in place."""
        self._readings[sequence] = reading

    def is_valid(self, sequence: Sequence) -> bool:
        """Whether what a sequence has read until now was its own prompt."""
        reading = self._readings.get(sequence)
        if reading is None or reading.num_old_steps is not None:
            return True
        return reading.session.peer_pool.stands(reading.slot, reading.generation)

    def is_reading(self, session: LinkSession) -> bool:
        """Whether anything of a link's pool is still read."""
        return any(reading.session is session for reading in self._readings.values())

    def held(self, session: LinkSession) -> list[int]:
        """Return the leases of a link that last."""
        return [
            reading.lease_id for reading in self._readings.values() if reading.session is session
        ]

    def left(self, sequence: Sequence) -> Reading | None:
        """A sequence has ended and no step reads its blocks: return what is to be released."""
        reading = self._readings.get(sequence)
        if reading is None:
            return None
        if reading.is_copying:
            reading.has_left = True  # the copy's end is the lease's
            return None
        return self._forget(sequence)

    # --- moving --------------------------------------------------------------------------------

    def unmoved(self, session: LinkSession) -> list[Sequence]:
        """Return the sequences that still read a link's pool in place."""
        return [
            sequence
            for sequence, reading in self._readings.items()
            if reading.session is session
            and not (sequence.has_ended or reading.num_old_steps is not None)
        ]

    def next_copies(self, max_blocks: int) -> list[tuple[LinkSession, BlockCopy]]:
        """Choose what to move next off the pools of lost links, `max_blocks` in all.

        What finds no room now is tried again: others end, or make room, until `unmoved` is asked.
        """
        self._take_rooms()
        copies: list[tuple[LinkSession, BlockCopy]] = []
        for reading in self._readings.values():
            if max_blocks == 0:
                break
            if reading.is_copying or not reading.targets or reading.has_left:
                continue
            start = reading.num_copied
            sources = reading.blocks[start : start + max_blocks]
            if not sources:
                continue
            reading.is_copying = True
            max_blocks -= len(sources)
            copy = BlockCopy(
                lease_id=reading.lease_id,
                slot=reading.slot,
                generation=reading.generation,
                sources=sources,
                targets=reading.targets[start : start + len(sources)],
                is_to_arena=reading.is_to_arena,
            )
            copies.append((reading.session, copy))
        return copies

    def _take_rooms(self) -> None:
        """Find room for everything that is to be moved and has none, the shortest first."""
        stranded = [
            (sequence, reading)
            for sequence, reading in self._readings.items()
            if reading.session.is_lost
            and not (reading.targets or sequence.has_ended or reading.num_old_steps is not None)
        ]
        for sequence, reading in sorted(stranded, key=lambda each: len(each[1].blocks)):
            self._take_room(sequence, reading)

    def _take_room(self, sequence: Sequence, reading: Reading) -> None:
        num_blocks = len(reading.blocks)
        if not self._scheduler.is_swapped(sequence):
            targets = self._scheduler.allocate(num_blocks)
            if targets is not None:
                reading.targets, sequence.is_moving = targets, True
                return
        targets = self._scheduler.move_out(sequence, num_blocks)
        if targets is not None:
            reading.targets, reading.is_to_arena = targets, True

    def copied(self, session: LinkSession, copy: BlockCopy, *, is_valid: bool) -> Reading | None:
        """Take note that a copy is over; return what is to be released by that.

        A copy that is not valid changes nothing: the step that reads the same blocks is void too.
        """
        sequence, reading = next(
            each
            for each in self._readings.items()
            if each[1].session is session and each[1].lease_id == copy.lease_id
        )
        reading.is_copying = False
        if reading.has_left:
            return self._forget(sequence)
        if not is_valid or sequence.has_ended:  # then `left` is to come
            return None
        reading.num_copied += len(copy.sources)
        if reading.num_copied < len(reading.blocks):
            return None
        targets, reading.targets = reading.targets, []
        if reading.is_to_arena:
            sequence.settle(sequence.blocks, [])
            self._scheduler.moved_out(sequence, targets)
        else:
            sequence.move_in(targets)
            sequence.is_moving = False
        reading.num_old_steps = sequence.num_in_flight
        return self._forget(sequence) if not reading.num_old_steps else None

    def stepped(self, sequence: Sequence) -> Reading | None:
        """A step of a sequence was collected; return what is to be released by that."""
        reading = self._readings.get(sequence)
        if reading is None or reading.num_old_steps is None:
            return None
        reading.num_old_steps -= 1
        return self._forget(sequence) if not reading.num_old_steps else None

    def has_copy(self, session: LinkSession, copy: BlockCopy) -> bool:
        """Whether a copy is one of ours."""
        return any(
            reading.session is session and reading.lease_id == copy.lease_id
            for reading in self._readings.values()
        )

    def _forget(self, sequence: Sequence) -> Reading:
        reading = self._readings.pop(sequence)
        if reading.targets:  # taken, and never moved into
            give_back = self._scheduler.free_places if reading.is_to_arena else self._scheduler.free
            give_back(reading.targets)
        return reading
