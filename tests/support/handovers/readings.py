"""The ways to read a peer's pool: the right one, and two that leave out what makes it right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.mapping import PeerPool

if TYPE_CHECKING:
    from tests.support.handovers.plan import Reading


class _Unasked(PeerPool):
    """Believes every block to be written."""

    def is_written(self, event: int | None) -> bool:
        return True


class _Unfenced(PeerPool):
    """Believes every lease to stand."""

    def stands(self, slot: int, generation: int) -> bool:
        return True


POOLS: dict[Reading, type[PeerPool]] = {
    "as decoded does": PeerPool,
    "without the event": _Unasked,
    "without the generation": _Unfenced,
}
