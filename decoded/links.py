"""All links of decoded: the living one, and lost ones whose blocks are still being read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.in_place import MOVE_S
from protocol import messages as wire

if TYPE_CHECKING:
    from decoded.in_place_desk import InPlaceDesk
    from decoded.link import LinkSession
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence


class Links:
    """The links, and what prefilld is told of the room that is left.

    Args:
        scheduler: The room.
    """

    def __init__(self, scheduler: Scheduler[Sequence]) -> None:
        self._scheduler = scheduler
        self._sessions: list[LinkSession] = []

    @property
    def sessions(self) -> tuple[LinkSession, ...]:
        """Links that live, and lost ones whose blocks are still being read."""
        return tuple(self._sessions)

    @property
    def has_reservations(self) -> bool:
        """Whether some living link holds a lease."""
        return any(session.is_open and not session.intake.is_empty for session in self._sessions)

    def add(self, session: LinkSession) -> None:
        """Serve what comes over a link."""
        self._sessions.append(session)

    def credits(self, session: LinkSession) -> wire.Credits:
        """Return what can still be taken, for a frame on that link."""
        room = self._scheduler.room
        return wire.Credits(
            free_blocks=room.free_blocks,
            free_sequences=room.free_sequences,
            queue_depth=sum(other.intake.num_unstarted for other in self._sessions),
            seen=session.intake.seen,
        )

    def tell_credits(self) -> None:
        """Tell prefilld about room that came free, or is gone."""
        for session in self._sessions:
            session.tell_credits()

    def held_leases(self, epoch: bytes, in_place: InPlaceDesk) -> list[int]:
        """Return the leases of an epoch whose blocks are still being read.

        Args:
            epoch: The pool's.
            in_place: What is read where it is.
        """
        return [
            lease_id
            for session in self._sessions
            if session.epoch == epoch
            for lease_id in (*session.intake.held, *in_place.held(session))
        ]

    def is_alone(self, session: LinkSession) -> bool:
        """Whether no other link's pool is mapped."""
        return not any(other.is_mapped for other in self._sessions if other is not session)

    def tick(self, in_place: InPlaceDesk) -> None:
        """Look after the links: is the peer there, and is a lost one's mapping still needed?

        Args:
            in_place: What is read where it is.
        """
        for session in self.sessions:
            session.tick()
            if session.lost_for_s >= MOVE_S:
                in_place.give_up(session)
            if not in_place.is_reading(session) and session.close_mapping():
                self._sessions.remove(session)
