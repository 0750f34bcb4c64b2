"""When prefilld is told of our room again, beside the frames that tell it anyway.  Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol import messages as wire


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
