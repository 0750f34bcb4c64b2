"""The room that prefilld is told of, and when it is told again.  Pure.

`Scheduler.room` says what it is.  Most frames to prefilld tell it by the way; `is_outdated` says
when one has to go for its sake alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol import messages as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What may still be reserved."""

    free_blocks: int
    free_sequences: int


def is_outdated(told: wire.Credits, now: wire.Credits) -> bool:
    """Whether prefilld's idea of our room is to be corrected.

    Room that came free is told at once.  Room that is gone would be told with every block that an
    answer takes; it is when prefilld believes in twice as much as there is, or in any where there
    is none.
    """
    return (
        now.free_blocks > told.free_blocks
        or now.free_sequences > told.free_sequences
        or 2 * now.free_blocks < told.free_blocks
    )
