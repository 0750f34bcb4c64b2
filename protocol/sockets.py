"""One connection on one non-blocking Unix socket, driven by an event loop's readiness.

Transports and streams lose descriptors, so this reads and writes the socket itself: `recvmsg` on
`add_reader`, `sendmsg` on `add_writer` (`writer.py`).  The rules:

-   What the peer sent before it died counts.  Whenever a write fails, the receive queue is shut,
    read to its end and delivered before `on_closed` speaks.
-   `on_closed` is called exactly once, whoever closed and why; only `detach` takes it away.
-   A message that breaks the rules is answered with the connection's `farewell` and ends it.
-   A reader that does not read costs at most `max_queue_bytes`.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from protocol.closing import CloseKind, CloseReason
from protocol.descriptors import DescriptorQueue
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import MAX_QUEUE_BYTES
from protocol.messages import Message, num_descriptors
from protocol.reading import Received, receive
from protocol.states import Role
from protocol.writer import FrameWriter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from protocol.connection import Connection

# Reads at one readiness, so that a peer that never pauses cannot starve the others.
MAX_READS = 16


class Detached(NamedTuple):
    """A connection on its way to decoded: the socket, and bytes that were read but not parsed."""

    socket: socket.socket
    residue: bytes


class MessageSocket:
    """Sends and delivers one connection's messages.

    Args:
        sock: A connected, non-blocking Unix stream socket; owned from here on.
        connection: What is legal on it.
        loop: The event loop of the thread that makes every call here.
        max_queue_bytes: Most bytes that may wait for the peer to read.
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        *,
        loop: asyncio.AbstractEventLoop,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
    ) -> None:
        self.connection = connection
        self._socket, self._loop = sock, loop
        self._writer = FrameWriter(
            sock,
            loop=loop,
            max_queue_bytes=max_queue_bytes,
            on_lost=self._on_lost,
            on_flushed=self._on_writer_flushed,
        )
        self._descriptors = DescriptorQueue()
        self._on_message: Callable[[Message, list[int] | None], None] = _not_started
        self._on_closed: Callable[[CloseReason], None] = _not_started
        self._on_flushed: Callable[[], None] | None = None
        self._is_open = True  # the socket is ours, and `on_closed` has not spoken
        self._is_reading = self._is_draining = self._closes_when_flushed = False

    def __repr__(self) -> str:
        where = f"{self.num_queued_bytes} bytes queued" if self._is_open else "closed"
        return f"<MessageSocket {self.connection!r}, {where}>"

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent here."""
        return self._is_open and self._writer.is_open

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has accepted every byte so far."""
        return not self._writer.num_queued_bytes

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        return self._writer.num_queued_bytes

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that the kernel has accepted, ever: what stands still is a stalled reader."""
        return self._writer.num_sent_bytes

    def start(
        self,
        on_message: Callable[[Message, list[int] | None], None],
        on_closed: Callable[[CloseReason], None],
        on_flushed: Callable[[], None] | None = None,
    ) -> None:
        """Begin to read and deliver; what the connection holds already comes first.

        Args:
            on_message: Gets each message and its descriptors, which are the callee's to close:
                an empty list where none belong, None where they were lost on the way.
            on_closed: Gets the reason, once.  The socket is closed by then.
            on_flushed: Called whenever bytes had to wait and the last of them is out.
        """
        self._on_message, self._on_closed, self._on_flushed = on_message, on_closed, on_flushed
        self._is_reading = True
        self._loop.add_reader(self._socket, self._on_readable)
        self._loop.call_soon(self._deliver)

    # --- writing ---------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        fds: Sequence[int] = (),
        *,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Write a message, or queue what the kernel does not take now.

        Once the connection is lost this does nothing: `on_closed` tells, or has told.

        Args:
            message: What to send.
            fds: The descriptors that ride on it.  They stay the caller's, and must stay open
                until `on_sent` or `on_closed`.
            on_sent: Called once the kernel has accepted every byte of this frame, at once where
                it can; never after `on_closed`.

        Raises:
            LocalProtocolError: The message is illegal now, or has not its descriptors.
        """
        if not self.is_open:
            return
        if not self._is_reading:
            _not_started()
        if len(fds) != num_descriptors(message):
            raise LocalProtocolError(
                f"{type(message).__name__} carries {num_descriptors(message)} descriptors, "
                f"not {len(fds)}"
            )
        self._writer.write(self.connection.send(message), fds, on_sent)

    async def flush(self) -> None:
        """Wait until the kernel has accepted every byte so far.

        Raises:
            ConnectionLostError: The connection ended first.
        """
        await self._writer.flush()

    def _on_writer_flushed(self) -> None:
        if self._closes_when_flushed:
            self.close()
        elif self._on_flushed is not None:
            self._on_flushed()

    def _on_lost(self, reason: CloseReason) -> None:
        # From the loop, so that no caller of `send` sees its connection end under its hands.
        self._loop.call_soon(self._drain, reason)

    # --- reading ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        # To the end: behind the death of a peer that had not read everything, uvloop reports
        # the socket once more and then never again, so an EOF left for later would be lost.
        for _ in range(MAX_READS):
            if not self._is_reading:
                return
            received = self._read()
            if received is None:
                return
            if isinstance(received, CloseReason):
                if self._is_open:
                    self._finish(received)
                return
        self._loop.call_soon(self._on_readable)  # others have their turn first

    def _read(self) -> Received | CloseReason | None:
        """Read once and deliver what came; see `receive`."""
        takes_descriptors = self.connection.role is Role.DECODED_LINK
        received = receive(self._socket, takes_descriptors=takes_descriptors)
        if isinstance(received, CloseReason):
            self.connection.receive_eof()
        elif received is not None:
            self.connection.receive_data(received.data)
            if takes_descriptors:
                self._descriptors.add(
                    received.fds,
                    is_cut=received.is_cut,
                    last_byte=self.connection.num_received_bytes - 1,
                )
            self._deliver()
        return received

    def _deliver(self) -> None:
        while self._is_reading:
            try:
                message = self.connection.next_event()
            except RemoteProtocolError as error:
                if farewell := self.connection.farewell(error):
                    self._writer.write(farewell)
                if self._is_open:
                    self._finish(CloseReason(CloseKind.PROTOCOL, error))
                return
            if message is None:
                return
            fds = self._descriptors.take(
                frame_end=self.connection.num_parsed_bytes, num_wanted=num_descriptors(message)
            )
            self._on_message(message, fds)

    # --- ending ----------------------------------------------------------------------------

    def detach(self) -> Detached:
        """Let go of a client's connection, to hand it to decoded; the reader is gone at once.

        The socket is the caller's now.  Should decoded not adopt it, `connection.reclaim` and a
        new `MessageSocket` over the same connection take it up again.

        Raises:
            LocalProtocolError: Bytes are still queued, or no answer is running.
        """
        if not self.is_open or not self.is_flushed:
            raise LocalProtocolError(f"{self!r} cannot be handed off")
        residue = self.connection.hand_off()
        self._release()
        return Detached(self._socket, residue)

    def close(self, *, shutdown: bool = True) -> None:
        """Close now; what is queued is lost.

        Args:
            shutdown: Also end the connection for those who hold a duplicate of the descriptor.
                False only drops this one: the connection lives on in the other process.
        """
        if self._is_open:
            self._finish(CloseReason(CloseKind.LOCAL), shutdown=shutdown)

    def close_when_flushed(self) -> None:
        """Close as soon as the kernel has accepted every byte: after END, ERROR, REFUSE, BYE."""
        if self.is_flushed:
            self.close()
        else:
            self._closes_when_flushed = True

    def shutdown_read_and_drain(self) -> None:
        """Let the peer send no more, deliver everything that it did send, and close."""
        self._drain(CloseReason(CloseKind.LOCAL))

    def _drain(self, reason: CloseReason) -> None:
        if not self._is_open or self._is_draining:
            return
        self._is_draining = True
        self._deliver()  # what was read already: a handler of an earlier message may have called us
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        # Nothing can be added to the receive queue any more, and behind it lies EOF.
        while self._is_reading and isinstance(self._read(), Received):
            pass
        if self._is_open:
            self._finish(reason)

    def _finish(self, reason: CloseReason, *, shutdown: bool = True) -> None:
        self._release()
        if shutdown:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._on_closed(reason)

    def _release(self) -> None:
        """Take the socket off the loop and drop everything that waits."""
        self._is_open = False
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._socket)
        self._writer.stop()
        self._descriptors.close()


def _not_started(*_: object) -> None:
    raise LocalProtocolError("a MessageSocket was used before `start`")
