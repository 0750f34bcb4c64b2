"""What a link asks of whoever serves it; `adoption.py` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from decoded.link import LinkSession
    from protocol import messages as wire


class LinkHandler(Protocol):
    """Who serves what comes over links."""

    def on_chunk(self, session: LinkSession, message: wire.Chunk) -> None:
        """Blocks of a running prefill may be read."""

    def on_handoff(
        self, session: LinkSession, message: wire.Handoff, descriptor: int | None
    ) -> None:
        """A request is ours, if its descriptor arrived and there is room."""

    def on_abort(self, session: LinkSession, message: wire.Abort) -> None:
        """Prefilld takes a lease back."""

    def on_lost(self, session: LinkSession) -> None:
        """The connection ended; its queue was read to the end."""

    def may_read_in_place(self, session: LinkSession) -> bool:
        """Whether no other link's pool is mapped: engines read one pool in place at a time."""

    def credits(self, session: LinkSession) -> wire.Credits:
        """Return what can still be taken."""
