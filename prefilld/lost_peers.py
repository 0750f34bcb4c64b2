"""Whether anybody may still be reading lent blocks: the processes behind links that were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.daemon.peer_watch import PeerWatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class LostPeers:
    """The present peer, and those that were lost and are not proved gone.

    Args:
        loop: The event loop.
        on_gone: Called when a lost peer is proved gone after all, with how many are still in
            doubt.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        self._loop, self._on_gone = loop, on_gone
        self._present: PeerWatch | None = None
        self._doubted: set[PeerWatch] = set()

    def found(self, pid: int, start_time: int) -> None:
        """A link to this process is being made.

        Args:
            pid: As this process sees it (SO_PEERCRED).
            start_time: What the peer said of itself.
        """
        if self._present is not None:
            self._present.close()
        self._present = PeerWatch(pid=pid, start_time=start_time, loop=self._loop)

    def lost(self) -> bool:
        """The link to the present peer ended; return whether its process is proved gone.

        Where it is not, `on_gone` follows as soon as it is; never where it cannot be watched.
        """
        watch, self._present = self._present, None
        if watch is None:
            return False
        is_gone = watch.is_gone
        if watch.is_able and not is_gone:
            self._doubted.add(watch)
            watch.when_gone(lambda: self._proved_gone(watch))
        else:
            watch.close()
        return is_gone

    def close(self) -> None:
        """Watch nobody any more."""
        for watch in (*self._doubted, self._present):
            if watch is not None:
                watch.close()

    def _proved_gone(self, watch: PeerWatch) -> None:
        self._doubted.discard(watch)
        self._on_gone(len(self._doubted))
