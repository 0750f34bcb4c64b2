"""Which requests decoded died under, and how often: one bad request must not take it down for good.

A decoded that dies loses everybody's streams, and nobody can tell which of them it died of.  So all
of them are suspected, and what is suspected twice is not served again: a request that kills decoded
takes it down twice, and an innocent one would have to be there by chance both times.

What counts: decoded went away without having said that it would (DRAIN), while

- the request was lent to it and not adopted, so that it would go to the next one; or
- it had adopted the request, and the client comes back for the rest (`resume`).  Whose answer was
  whole before does not come back, so it is not counted.

A decoded that only fell silent counts once it is proved gone.  Pure: no clock, no I/O.  A prefilld
that is started again knows nothing of this; there the clients' own bound on attempts holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from protocol.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEATHS = 2
"""Deaths of decoded after which a request is poisoned."""

MAX_REMEMBERED = 16_384
"""Most ids kept in each list, the oldest forgotten first: four times the clients that can be
connected, so that whoever comes back is still known."""

V = TypeVar("V")


class Casualties:
    """The record of one prefilld's life."""

    def __init__(self) -> None:
        # The first three are sets that keep their order.
        self._lent: dict[str, None] = {}
        """Not adopted by a decoded that was lost and is not known to be dead."""
        self._adopted: dict[str, None] = {}
        """With the present decoded, or whole by now."""
        self._bereft: dict[str, None] = {}
        """Adopted by a decoded that died; counted if their clients come back."""
        self._deaths: dict[str, int] = {}

    # --- what becomes of decoded ---------------------------------------------------------------

    def peer_found(self) -> None:
        """A link is open: what was lent over an earlier one has done no harm."""
        self._lent.clear()

    def peer_lost(self, lent: Iterable[str]) -> None:
        """The link ended while these requests were lent and not adopted; `peer_died` may follow."""
        self._lent = dict.fromkeys(lent)

    def peer_died(self) -> None:
        """Decoded went away without a word."""
        for request_id in self._adopted:
            _remember(self._bereft, request_id, None)
        for request_id in self._lent:
            self._count(request_id)
        self.peer_left()

    def peer_left(self) -> None:
        """Decoded went as it had announced: nobody is suspected."""
        self._lent.clear()
        self._adopted.clear()

    # --- what becomes of requests --------------------------------------------------------------

    def begun(self, request_id: str) -> None:
        """A new request has this id, and nothing to do with an earlier one that was served."""
        for known in (self._adopted, self._bereft):
            known.pop(request_id, None)
        if not self.is_poisoned(request_id):
            self._deaths.pop(request_id, None)

    def adopted(self, request_id: str) -> None:
        """Decoded has a request now."""
        _remember(self._adopted, request_id, None)

    def came_back(self, request_id: str) -> int:
        """A client wants the rest of its answer; return how often decoded died under it."""
        if request_id in self._bereft:
            del self._bereft[request_id]
            self._count(request_id)
        return self._deaths.get(request_id, 0)

    def is_poisoned(self, request_id: str) -> bool:
        """Whether decoded died under a request too often."""
        return self._deaths.get(request_id, 0) >= MAX_DEATHS

    def _count(self, request_id: str) -> None:
        _remember(self._deaths, request_id, self._deaths.get(request_id, 0) + 1)


def poisoned_error(request_id: str) -> RequestError:
    """Return what the client of a poisoned request is told."""
    return RequestError(
        "poisoned",
        f"decoded died {MAX_DEATHS} times while it had request {request_id}, so it is not served "
        "again; if decoded's log shows another cause, ask anew under another id",
    )


def _remember(known: dict[str, V], request_id: str, value: V) -> None:
    """Put an id behind all others, and forget the oldest where there are too many."""
    known.pop(request_id, None)
    known[request_id] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
