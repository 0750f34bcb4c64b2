"""Connecting again, for ever: a pause that grows, and one word about each new cause of failure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Never

from protocol.errors import LinkRefusedError, UnixSocketError
from shared.errors import MemoryShortageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
"""Pause before connecting again: doubles from the first to the last."""


async def keep_connected(
    one_session: Callable[[], Awaitable[None]],
    *,
    on_pause: Callable[[], None],
    log: FilteringBoundLogger,
) -> Never:
    """Hold one session after the other.

    Args:
        one_session: Connects and serves; returns when an open link was lost, and raises where none
            came to be.
        on_pause: Called after each session, before the pause.
        log: Told of a fault when it is another than the last.
    """
    pause_s, last_fault = FIRST_PAUSE_S, ""
    while True:
        try:
            await one_session()
            pause_s, last_fault = FIRST_PAUSE_S, ""
        except (
            UnixSocketError,
            LinkRefusedError,
            ConnectionError,
            TimeoutError,
            MemoryShortageError,
        ) as error:
            fault = str(error) or "the hand-shake took too long"
            if fault != last_fault:
                log.warning("link.failed", reason=fault)
            last_fault = fault
        on_pause()
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, pause_s * 2)
