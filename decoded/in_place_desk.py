"""Carries out what reading in place calls for: leases given back, the move when prefilld dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.in_place import InPlaceReadings, Reading
from protocol import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from decoded.lease_effects import BlockCopy, Pulled
    from decoded.link import LinkSession
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook


class InPlaceDesk:
    """What is read in place over all links.

    Args:
        scheduler: Has the room that is moved to; told of sequences that leave, it tells this desk.
        book: Where a sequence ends that cannot be moved.
        credits: Returns what can still be taken, for a frame on a link.
        on_work: Called when there may be something to copy or to decode.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler[Sequence],
        book: SequenceBook,
        credits: Callable[[LinkSession], wire.Credits],
        on_work: Callable[[], None],
    ) -> None:
        self._book, self._credits, self._on_work = book, credits, on_work
        self._readings = InPlaceReadings(scheduler)
        scheduler.on_left = self._left

    def add(self, session: LinkSession, pulled: Pulled[Sequence]) -> None:
        """A sequence has started that reads in place."""
        sequence = pulled.request
        reading = Reading(
            session=session,
            lease_id=sequence.lease_id,
            slot=sequence.slot,
            generation=sequence.generation,
            blocks=pulled.in_place,
        )
        self._readings.add(sequence, reading)

    def held(self, session: LinkSession) -> list[int]:
        """Return the leases of a link that last."""
        return self._readings.held(session)

    def is_reading(self, session: LinkSession) -> bool:
        """Whether anything of a link's pool is still read."""
        return self._readings.is_reading(session)

    # --- steps -------------------------------------------------------------------------------

    def is_valid(self, sequence: Sequence) -> bool:
        """Whether what a step has read for a sequence was its own prompt."""
        return self._readings.is_valid(sequence)

    def stepped(self, batch: Iterable[Sequence]) -> None:
        """A step was collected."""
        for sequence in batch:
            self._release(self._readings.stepped(sequence))

    def _left(self, sequence: Sequence) -> None:
        self._release(self._readings.left(sequence))

    # --- moving ------------------------------------------------------------------------------

    def give_up(self, session: LinkSession) -> None:
        """End what could not be moved in time."""
        for sequence in self._readings.unmoved(session):
            self._book.fail(
                sequence, "prefill-lost", "prefilld died, and there was no room to move in time"
            )

    def next_copies(self, max_blocks: int) -> list[tuple[LinkSession, BlockCopy]]:
        """Choose what to move next."""
        return self._readings.next_copies(max_blocks)

    def has_copy(self, session: LinkSession, copy: BlockCopy) -> bool:
        """Whether a copy is one of ours."""
        return self._readings.has_copy(session, copy)

    def copied(self, session: LinkSession, copy: BlockCopy, *, is_valid: bool) -> None:
        """Take note that one of our copies is over."""
        self._release(self._readings.copied(session, copy, is_valid=is_valid))
        self._on_work()

    def _release(self, reading: Reading | None) -> None:
        """Give back a lease under which nothing is read any more."""
        if reading is not None and reading.session.is_open:
            session, lease_id = reading.session, reading.lease_id
            credits = self._credits(session)
            session.send(wire.Release(epoch=session.epoch, lease=lease_id, credits=credits))
