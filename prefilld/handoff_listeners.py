"""What the desk that hands requests over asks of a link, and of whoever keeps the requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prefilld.request import Request
    from protocol import messages as wire


class LinkSender(Protocol):
    """What the desk needs of an open link."""

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message, with descriptors on its first byte."""


class RequestOwner(Protocol):
    """Who keeps the requests, and is told what becomes of them."""

    def wake(self) -> None:
        """Blocks came free."""

    def adopted(self, request: Request) -> None:
        """A request is decoded's now."""

    def rejected(self, request: Request, code: str, message: str) -> None:
        """Decoded did not take a request: put it back with `ready`, or end it."""
