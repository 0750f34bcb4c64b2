"""One client's connection for as long as it is prefilld's, and on its way to decoded.

The connection is read until the moment of the hand-over, and again if decoded does not take it;
between the two nobody reads it here, and nothing is written to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from protocol import messages as wire
from protocol.closing import CloseReason
from protocol.connection import Connection
from protocol.sockets import Detached, MessageSocket
from protocol.states import Role

if TYPE_CHECKING:
    import asyncio
    import socket


class ClientHandler(Protocol):
    """Who is told what clients do."""

    def on_request(self, client: Client, message: wire.Message) -> None:
        """A client asked for something; this is the connection's only request."""

    def on_cancel(self, client: Client) -> None:
        """A client wants its answer to end."""

    def on_flushed(self, client: Client) -> None:
        """A client that was slow took everything."""

    def on_gone(self, client: Client, reason: CloseReason) -> None:
        """A connection ended; nothing can be sent any more."""

    def on_handed_over(self, client: Client) -> None:
        """A connection is decoded's."""


class Client:
    """A connection at prefilld's socket.

    Args:
        sock: The accepted socket, owned from here on.
        max_request_bytes: Largest request taken.
        now_s: When it was accepted, on the monotonic clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        handler: ClientHandler,
        max_request_bytes: int,
        now_s: float,
    ) -> None:
        self._loop, self._handler = loop, handler
        self._connection = Connection(Role.PREFILLD_CLIENT, max_body_bytes=max_request_bytes)
        self._detached: Detached | None = None
        self._progress_s = now_s
        self._progress_bytes = 0
        self.has_asked = False
        """Whether its request has arrived."""
        self._is_answered = False
        self.is_cancelled = False
        """Whether it asked for its answer to end, perhaps before the request was judged."""
        self._socket = self._attach(sock)

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent here."""
        return self._detached is None and self._socket.is_open

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has taken everything that was sent."""
        return self.is_open and self._socket.is_flushed

    def send(self, message: wire.Message) -> None:
        """Send a message; one to a client that is gone is dropped."""
        if self.is_open:
            self._socket.send(message)

    def finish(self, message: wire.Message) -> None:
        """Send the last message, and close once it is out; only the first of them is sent."""
        if self.is_open and not self._is_answered:
            self._is_answered = True
            self._socket.send(message)
            self._socket.close_when_flushed()

    def close(self) -> None:
        """Close at once, whatever is still queued."""
        if self._detached is not None:
            self.drop_duplicate()
        else:
            self._socket.close()

    def is_stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether it has taken no byte, or asked for nothing, for longer than `timeout_s`."""
        if self._detached is not None:
            return False
        sent = self._socket.num_sent_bytes
        is_waiting = not self.has_asked or not self._socket.is_flushed
        if sent != self._progress_bytes or not is_waiting:
            self._progress_bytes, self._progress_s = sent, now_s
        return now_s - self._progress_s >= timeout_s

    # --- the hand-over -----------------------------------------------------------------------

    def detach(self) -> Detached:
        """Stop reading, for good unless `take_back` follows.

        Returns:
            The socket, whose descriptor is to ride on HANDOFF and which stays open here until
            ADOPT, and the bytes that were read but not parsed.
        """
        self._detached = self._socket.detach()
        return self._detached

    def take_back(self) -> None:
        """Decoded did not adopt the connection: read on where `detach` stopped."""
        assert self._detached is not None, "the connection was never detached"
        detached, self._detached = self._detached, None
        self._connection.reclaim(detached.residue)
        self._socket = self._attach(detached.socket)

    def drop_duplicate(self) -> None:
        """The connection is decoded's: close this descriptor of it, without a trace on the wire.

        While it is open, the client would not see that decoded has closed.
        """
        assert self._detached is not None, "the connection was never detached"
        self._detached.socket.close()
        self._detached = None
        self._handler.on_handed_over(self)

    # --- events ------------------------------------------------------------------------------

    def _attach(self, sock: socket.socket) -> MessageSocket:
        message_socket = MessageSocket(sock, self._connection, loop=self._loop)
        message_socket.start(self._on_message, self._on_closed, self._on_flushed)
        return message_socket

    def _on_message(self, message: wire.Message, _fds: list[int] | None) -> None:
        if isinstance(message, wire.Cancel):
            self.is_cancelled = True
            self._handler.on_cancel(self)
        else:
            self.has_asked = True
            self._handler.on_request(self, message)

    def _on_flushed(self) -> None:
        self._handler.on_flushed(self)

    def _on_closed(self, reason: CloseReason) -> None:
        self._handler.on_gone(self, reason)
