"""The bounded queue of frames in front of one non-blocking socket.

A frame's descriptors go out with its first byte and never again: not after a short write, and not
before one that said EAGAIN, for then nothing was sent.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.closing import CloseKind, CloseReason
from protocol.descriptors import rights
from protocol.errors import ConnectionLostError

if TYPE_CHECKING:
    import asyncio
    import socket
    from array import array
    from collections.abc import Callable, Sequence

# The kernel refuses for now: too many descriptors are on their way, or memory is short.  No
# readiness tells when that is over, so the write is tried again after this many seconds.
RETRY_S = 0.005
_TRANSIENT = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True)
class _Outgoing:
    """The rest of one frame; its descriptors until the first byte is out."""

    view: memoryview
    ancillary: list[tuple[int, int, array[int]]]
    on_sent: Callable[[], None] | None


class FrameWriter:
    """Writes frames in order, as fast as the peer reads and no further ahead than a bound.

    Args:
        sock: A connected, non-blocking stream socket; stays the caller's.
        loop: The event loop of the thread that makes every call here.
        max_queue_bytes: Most bytes that may wait.
        on_lost: Called once when nothing can be written any more; what waited is dropped.
        on_flushed: Called whenever bytes had to wait and the last of them is out.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        max_queue_bytes: int,
        on_lost: Callable[[CloseReason], None],
        on_flushed: Callable[[], None],
    ) -> None:
        self._socket, self._loop, self._max_queue_bytes = sock, loop, max_queue_bytes
        self._on_lost, self._on_flushed = on_lost, on_flushed
        self._outgoing: deque[_Outgoing] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._retry: asyncio.TimerHandle | None = None
        self._num_queued_bytes = self._num_sent_bytes = 0
        self._is_open = True
        self._is_writing = self._waits_for_room = False

    @property
    def is_open(self) -> bool:
        """Whether frames are still taken."""
        return self._is_open

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        return self._num_queued_bytes

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that the kernel has accepted, ever."""
        return self._num_sent_bytes

    def write(
        self,
        frame: bytes,
        fds: Sequence[int] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Write a frame, or queue what the kernel does not take now."""
        if not self._is_open:
            return
        self._outgoing.append(_Outgoing(memoryview(frame), rights(fds), on_sent))
        self._num_queued_bytes += len(frame)
        # A callback of a running `_write` may land here: then that one goes on with this frame.
        if not self._is_writing and not self._waits_for_room:
            self._write()
        if self._num_queued_bytes > self._max_queue_bytes:
            self._lose(CloseReason(CloseKind.SLOW))

    async def flush(self) -> None:
        """Wait until the kernel has accepted every byte so far.

        Raises:
            ConnectionLostError: Nothing can be written any more.
        """
        if not self._is_open:
            raise _not_flushed()
        if self._outgoing:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def stop(self) -> None:
        """Take the socket off the loop and drop what waits.  Safe to repeat."""
        self._is_open = False
        self._stop_waiting()
        self._outgoing.clear()
        self._num_queued_bytes = 0
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(_not_flushed())
        self._waiters.clear()

    def _lose(self, reason: CloseReason) -> None:
        if self._is_open:
            self.stop()
            self._on_lost(reason)

    def _on_writable(self) -> None:
        self._stop_waiting()
        self._write()
        if self._is_open and not self._outgoing:
            self._on_flushed()

    def _write(self) -> None:
        """Give the kernel what it takes; the queue's order is the stream's order."""
        self._is_writing = True
        try:
            while self._outgoing and not self._waits_for_room:
                self._write_some(self._outgoing[0])
        finally:
            self._is_writing = False
        if self._outgoing:
            return
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _write_some(self, head: _Outgoing) -> None:
        try:
            num_sent = self._socket.sendmsg([head.view], head.ancillary)
        except (BlockingIOError, InterruptedError):
            self._waits_for_room = True
            self._loop.add_writer(self._socket, self._on_writable)
            return
        except OSError as error:
            if error.errno in _TRANSIENT:
                self._waits_for_room = True
                self._retry = self._loop.call_later(RETRY_S, self._on_writable)
                return
            is_gone = isinstance(error, BrokenPipeError | ConnectionResetError)
            self._lose(CloseReason(CloseKind.GONE if is_gone else CloseKind.FAULT, error))
            return
        head.ancillary = []
        head.view = head.view[num_sent:]
        self._num_queued_bytes -= num_sent
        self._num_sent_bytes += num_sent
        if not head.view:
            self._outgoing.popleft()
            if head.on_sent is not None:
                head.on_sent()

    def _stop_waiting(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        elif self._waits_for_room:
            self._loop.remove_writer(self._socket)
        self._waits_for_room = False


def _not_flushed() -> ConnectionLostError:
    return ConnectionLostError("the connection ended before everything was written")
