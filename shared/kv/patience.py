"""Waiting for memory that a process which ends still holds: bounded, and only while that may help.

After a crash the memory comes back when the other daemon has closed its mapping (within 1 s) and
the dead process is torn down (0.4 s for 86 GB on a GPU); a supervisor that starts the successor at
once must find neither too little nor, where it measures, a part of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

PATIENCE_S = 10.0
"""For an allocation that could fit: ten times the longest that was seen."""

RETRY_S = 0.02
"""Between two tries, and between two looks: memory that is there again is taken at once."""

SETTLE_S = 5.0
"""The longest that memory may go on coming back before a share of it is taken all the same."""

QUIET_S = 0.5
"""What has not grown for so long is held to have come back."""


def wait_for(
    attempt: Callable[[], T | None],
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """Return what an attempt came to, or None where patience ended first.

    Args:
        attempt: Tries; None where it is to be tried again.  Called once at least.
        patience_s: How long to wait in all.
        sleep: Waits for so many seconds.
    """
    tries_left = int(patience_s / RETRY_S)
    while (result := attempt()) is None and tries_left:
        tries_left -= 1
        sleep(RETRY_S)
    return result


def settled(
    free_bytes: Callable[[], int],
    *,
    patience_s: float = SETTLE_S,
    quiet_s: float = QUIET_S,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Return how much memory is free once no more of it comes back.

    What others take meanwhile is not waited for: it shows in what is returned.

    Args:
        free_bytes: Asks how much is free now.
        patience_s: The longest to wait.
        quiet_s: How long it must not have grown.
        sleep: Waits for so many seconds.
    """
    quiet_looks = round(quiet_s / RETRY_S)
    free, num_quiet = free_bytes(), 0
    for _ in range(int(patience_s / RETRY_S)):
        if num_quiet == quiet_looks:
            break
        sleep(RETRY_S)
        before, free = free, free_bytes()
        num_quiet = 0 if free > before else num_quiet + 1
    return free
