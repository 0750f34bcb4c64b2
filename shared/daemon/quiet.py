"""Whether a daemon has had nothing to do for long enough to count its books.  Pure.

Counting those of a pool of 40,000 blocks holds an event loop up for 5 to 15 ms.  Requests of one
user often follow each other by less than a second, so it is not done right behind each of them.
"""

from __future__ import annotations

QUIET_S = 1.0
"""How long it must have been idle."""


class QuietTime:
    """Since when one daemon has been idle."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def is_over(self, *, is_idle: bool, now_s: float) -> bool:
        """Take a look; return whether it was idle at every look of the last `QUIET_S`.

        Args:
            is_idle: Whether it is idle now.
            now_s: On the monotonic clock.
        """
        if not is_idle:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= QUIET_S
