"""The one clock that durations and deadlines are read from, and its stand-in for tests.

CLOCK_MONOTONIC is shared by every process of a host, so a reading that one daemon sends
means the same to the other.  Wall-clock time is for log lines only.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000


def whole_us(duration_ns: int | None) -> int | None:
    """Return a duration in microseconds, as logs tell it; none stays none."""
    return None if duration_ns is None else duration_ns // NS_PER_US


class Clock(Protocol):
    """Where the impure shells read the time that they hand to pure code."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        ...


class SystemClock:
    """The kernel's clock."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()


class FakeClock:
    """A clock that stands still until it is told to move.

    Args:
        start_ns: The first reading, in nanoseconds.
    """

    def __init__(self, start_ns: int = NS_PER_S) -> None:
        self._now_ns = start_ns

    def monotonic_ns(self) -> int:
        """Return the time that `advance` brought this clock to."""
        return self._now_ns

    def advance(self, duration_s: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: `duration_s` is negative: a monotonic clock never goes back.
        """
        if duration_s < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-duration_s} s")
        self._now_ns += round(duration_s * NS_PER_S)
