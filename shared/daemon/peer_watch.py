"""Whether the process at the other end is gone: a question that the end of a link does not answer.

A connection can end while its peer lives, and a stopped peer keeps its connections.  A pidfd
becomes readable when the process is gone, and then only.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from shared.daemon.instance import open_pidfd

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class PeerWatch:
    """Watches one process; `close` it in the end.

    Args:
        pid: As this process sees it (SO_PEERCRED).
        start_time: What the peer said of itself, so that a later process is not taken for it.
        loop: The event loop.
    """

    def __init__(self, *, pid: int, start_time: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pidfd = open_pidfd(pid, start_time)
        self._is_waiting = False

    @property
    def is_able(self) -> bool:
        """Whether the process can be watched at all; otherwise its end is never proved."""
        return self._pidfd is not None

    @property
    def is_gone(self) -> bool:
        """Whether the process is proved gone; False also where it cannot be watched."""
        return self._pidfd is not None and _is_readable(self._pidfd)

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the process is gone; never where it cannot be watched."""
        if self._pidfd is not None and not self._is_waiting:
            self._is_waiting = True
            self._loop.add_reader(self._pidfd, self._gone, callback)

    def close(self) -> None:
        """Watch no more.  Idempotent."""
        if self._pidfd is None:
            return
        if self._is_waiting:
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None

    def _gone(self, callback: Callable[[], None]) -> None:
        self.close()
        callback()


def _is_readable(fd: int) -> bool:
    # poll, since select cannot take descriptors above 1,023.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
