"""Whether anybody may still be reading lent blocks: the processes behind links that were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.daemon.peer_watch import PeerWatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

Process = tuple[int, int]
"""Its pid as seen from here, and when it started."""


class LostPeers:
    """The present peer, and those that were lost and are not proved gone.

    Args:
        loop: The event loop.
        on_gone: Called when a lost peer is proved gone after all, with how many are still in
            doubt.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        self._loop, self._on_gone = loop, on_gone
        self._present: tuple[Process, PeerWatch] | None = None
        self._doubted: dict[Process, PeerWatch] = {}
        """One for each process, however often its link was lost: each takes a descriptor."""

    def found(self, pid: int, start_time: int) -> None:
        """A link to this process is being made.

        Args:
            pid: As this process sees it (SO_PEERCRED).
            start_time: What the peer said of itself.
        """
        if self._present is not None:
            self._present[1].close()
        watch = PeerWatch(pid=pid, start_time=start_time, loop=self._loop)
        self._present = (pid, start_time), watch

    def lost(self) -> bool:
        """The link to the present peer ended; return whether its process is proved gone.

        Where it is not, `on_gone` follows as soon as it is; never where it cannot be watched.
        """
        present, self._present = self._present, None
        if present is None:
            return False
        process, watch = present
        is_gone = watch.is_gone
        if watch.is_able and not is_gone and process not in self._doubted:
            self._doubted[process] = watch
            watch.when_gone(lambda: self._proved_gone(process))
        else:
            watch.close()
        return is_gone

    def close(self) -> None:
        """Watch nobody any more."""
        for watch in self._doubted.values():
            watch.close()
        if self._present is not None:
            self._present[1].close()

    def _proved_gone(self, process: Process) -> None:
        del self._doubted[process]
        self._on_gone(len(self._doubted))
