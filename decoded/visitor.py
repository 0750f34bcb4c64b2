"""A connection at decoded's socket until it is known what it wants: STATUS, METRICS or the link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol import messages as wire
from protocol.connection import Connection
from protocol.sockets import MessageSocket
from protocol.states import Role
from protocol.unix import Credentials, peer_credentials

if TYPE_CHECKING:
    import asyncio
    import socket

    from decoded.link import LinkSession
    from protocol.closing import CloseReason


class VisitorHandler(Protocol):
    """Who answers."""

    def on_status(self, visitor: Visitor) -> None:
        """It asks for STATUS."""

    def on_metrics(self, visitor: Visitor) -> None:
        """It asks for METRICS."""

    def on_hello(self, visitor: Visitor, hello: wire.Hello) -> None:
        """It is prefilld and wants the link."""

    def on_gone(self, visitor: Visitor, code: str | None) -> None:
        """The connection ended; `code` names the rule that its peer broke, if it did."""


class Visitor:
    """One accepted connection.

    Args:
        sock: The accepted socket, owned from here on.
        now_s: When it was accepted, on the monotonic clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        handler: VisitorHandler,
        now_s: float,
    ) -> None:
        self._handler = handler
        self._session: LinkSession | None = None
        self._is_link = False
        self._came_s = now_s
        self.credentials: Credentials = peer_credentials(sock)
        """Who is at the other end, as the kernel saw it at `connect`."""
        self.socket = MessageSocket(sock, Connection(Role.DECODED_CLIENT), loop=loop)
        self.socket.start(self._on_message, self._on_closed)

    def finish(self, message: wire.Message) -> None:
        """Send the one answer and close."""
        if self.socket.is_open:
            self.socket.send(message)
            self.socket.close_when_flushed()

    def become(self, session: LinkSession) -> None:
        """Pass everything that follows to the session of a link."""
        self._session = session

    def close(self) -> None:
        """Close at once."""
        if self._session is None:
            self.socket.close()

    def is_stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether a client has neither asked nor taken its answer for longer than `timeout_s`."""
        return not self._is_link and now_s - self._came_s >= timeout_s

    def _on_message(self, message: wire.Message, fds: list[int] | None) -> None:
        if self._session is not None:
            self._session.on_message(message, fds)
            return
        match message:
            case wire.StatusRequest():
                self._handler.on_status(self)
            case wire.MetricsRequest():
                self._handler.on_metrics(self)
            case wire.Hello():
                self._is_link = True
                self._handler.on_hello(self, message)
            case wire.Bye():  # it gave up before HELLO was answered
                self.socket.close()

    def _on_closed(self, reason: CloseReason) -> None:
        error_code = getattr(reason.error, "code", None)
        self._handler.on_gone(self, error_code if isinstance(error_code, str) else None)
        if self._session is not None:
            self._session.on_closed(reason)
