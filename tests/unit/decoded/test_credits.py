"""When prefilld is told of the room again."""

from __future__ import annotations

import pytest

from decoded.credits import is_outdated
from protocol import messages as wire


def credits_of(free_blocks: int, free_sequences: int = 3) -> wire.Credits:
    return wire.Credits(
        free_blocks=free_blocks, free_sequences=free_sequences, queue_depth=0, seen=0
    )


@pytest.mark.parametrize(
    ("told", "now", "expected"),
    [
        ((10, 3), (10, 3), False),
        ((10, 3), (11, 3), True),
        ((10, 3), (10, 4), True),
        ((10, 3), (10, 1), False),
        ((10, 3), (5, 3), False),
        ((10, 3), (4, 3), True),
        ((1, 3), (0, 3), True),
        ((0, 3), (0, 3), False),
    ],
)
def test_room_that_came_free_is_told_and_room_that_is_gone_where_it_matters(
    told: tuple[int, int],
    now: tuple[int, int],
    expected: bool,  # a case
) -> None:
    """A word with every block that an answer takes would be one with every few steps."""
    assert is_outdated(credits_of(*told), credits_of(*now)) == expected
