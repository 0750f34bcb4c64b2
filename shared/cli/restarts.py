"""When a daemon that died is started again, and when to give up.  No clock, no processes."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
"""The delay doubles from the first to the longest with each death in a row."""

MAX_DEATHS = 5
DEATH_WINDOW_S = 60.0
"""So many deaths in so short a time will not be mended by another start.

A daemon that ran for the whole window is well again: its next death is the first in a row.
"""


class RestartPolicy:
    """The history of one daemon's deaths."""

    def __init__(self) -> None:
        self._deaths_s: deque[float] = deque(maxlen=MAX_DEATHS)
        self._delay_s = FIRST_DELAY_S

    def died(self, *, now_s: float, started_s: float) -> float | None:
        """Note a death; return how long to wait before the next start, or None to give up."""
        if now_s - started_s >= DEATH_WINDOW_S:
            self._delay_s = FIRST_DELAY_S
        self._deaths_s.append(now_s)
        if len(self._deaths_s) == MAX_DEATHS and now_s - self._deaths_s[0] <= DEATH_WINDOW_S:
            return None
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, MAX_DELAY_S)
        return delay_s
