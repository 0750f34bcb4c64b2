"""Accepting connections on an event loop without spinning when descriptors run out."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

# Connections taken a readiness, so that a storm of them does not hold up the streams.
BATCH = 16

# Out of descriptors or memory, a listening socket stays readable and the loop would spin; it is
# left alone for this many seconds, and the connections wait in the kernel's queue.
PAUSE_S = 0.1
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Hands over every connection that comes to a listening socket, until stopped.

    Args:
        listener: A non-blocking listening socket; stays the caller's, also when inherited.
        on_connection: Gets each connection, non-blocking, now the callee's.
        loop: The event loop of the thread that makes every call here.
        on_exhausted: Told when descriptors or memory ran out, for a log line and a metric.
    """

    def __init__(
        self,
        listener: socket.socket,
        on_connection: Callable[[socket.socket], None],
        *,
        loop: asyncio.AbstractEventLoop,
        on_exhausted: Callable[[OSError], None] | None = None,
    ) -> None:
        self._listener, self._loop = listener, loop
        self._on_connection, self._on_exhausted = on_connection, on_exhausted
        self._pause: asyncio.TimerHandle | None = None
        self._is_running = True
        self._loop.add_reader(listener, self._on_readable)

    def stop(self) -> None:
        """Accept no more; what waits stays in the kernel's queue.  Safe to repeat."""
        if not self._is_running:
            return
        self._is_running = False
        if self._pause is None:
            self._loop.remove_reader(self._listener)
        else:
            self._pause.cancel()

    def _on_readable(self) -> None:
        for _ in range(BATCH):
            if not self._is_running:
                return
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._rest()
                if self._on_exhausted is not None:
                    self._on_exhausted(error)
                return
            sock.setblocking(False)
            self._on_connection(sock)

    def _rest(self) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_readable)
