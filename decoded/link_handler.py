"""What a link asks of whoever serves it; `adoption.py` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from protocol import messages as wire

L_contra = TypeVar("L_contra", contravariant=True)
"""What a link is called by: `LinkSession`, which need not be known here."""


class LinkHandler(Protocol[L_contra]):
    """Who serves what comes over links."""

    def on_chunk(self, session: L_contra, message: wire.Chunk) -> None:
        """Blocks of a running prefill may be read."""

    def on_handoff(self, session: L_contra, message: wire.Handoff, descriptor: int | None) -> None:
        """A request is ours, if its descriptor arrived and there is room."""

    def on_abort(self, session: L_contra, message: wire.Abort) -> None:
        """Prefilld takes a lease back."""

    def on_lost(self, session: L_contra) -> None:
        """The connection ended; its queue was read to the end."""

    def may_read_in_place(self, session: L_contra) -> bool:
        """Whether no other link's pool is mapped: engines read one pool in place at a time."""

    def credits(self, session: L_contra) -> wire.Credits:
        """Return what can still be taken."""
