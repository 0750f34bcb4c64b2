"""Tells how far the loading of a model is: often enough to be watched, seldom enough for a log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.service.frame import Service

REPORT_INTERVAL_S = 2.0
"""Between two reports; a model that loads faster is not reported at all."""


class LoadProgress:
    """What a loader calls, from any thread.

    Args:
        report: Hears a percentage.
        clock: Tells when the next report is due.
    """

    def __init__(self, report: Callable[[int], object], clock: Clock) -> None:
        self._report, self._clock = report, clock
        self._next_ns = self._due()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Take note of (bytes done, bytes in all)."""
        if self._clock.monotonic_ns() < self._next_ns or not total_bytes:
            return
        self._next_ns = self._due()
        self._report(100 * done_bytes // total_bytes)

    def _due(self) -> int:
        return self._clock.monotonic_ns() + int(REPORT_INTERVAL_S * NS_PER_S)


def load_progress(service: Service) -> LoadProgress:
    """Return what reports to a service, on whose event loop this is called."""
    loop = asyncio.get_running_loop()
    return LoadProgress(
        lambda percent: loop.call_soon_threadsafe(service.loading, percent), service.clock
    )
