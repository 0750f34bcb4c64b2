"""The replay of lengths: what it counts, and that nothing of a pool is left behind."""

from __future__ import annotations

import pytest

from tests.benchmarks.kv_waste import (
    BLOCK_SIZE,
    LARGE_POOL_BLOCKS,
    SMALL_POOL_BLOCKS,
    Lengths,
    replay,
    traces,
)

MAX_WASTE_PCT = 4.0
NUM_REQUESTS = 500
"""Of a trace; all 2,000 tell nearly the same and take four times as long."""


def made_up_lengths() -> Lengths:
    """Return lengths like Azure's, for where no trace is at hand."""
    return [(200 + 997 * number % 3000, 20 + 331 * number % 400) for number in range(NUM_REQUESTS)]


def test_a_lone_answer_wastes_what_is_behind_its_last_token() -> None:
    """16 steps from a full block on: 1 to 16 of its second block's slots are used."""
    waste = replay([(BLOCK_SIZE, BLOCK_SIZE + 1)], 10)
    used = sum(BLOCK_SIZE + step for step in range(1, BLOCK_SIZE + 1))
    assert waste.num_steps == BLOCK_SIZE
    assert waste.unused_pct == pytest.approx((1 - used / (2 * BLOCK_SIZE * BLOCK_SIZE)) * 100)
    assert waste.num_preempted == 0


def test_many_answers_in_a_small_pool_waste_half_a_block_each() -> None:
    """Some make room for others, and every one of them is served."""
    waste = replay([(100 + 7 * number % 50, 200) for number in range(40)], 60)
    assert waste.num_preempted > 0
    assert 2 < waste.unused_pct < 6
    assert waste.num_steps >= 199


@pytest.mark.parametrize("is_crowded", [False, True])
def test_of_the_lengths_of_public_traces_next_to_nothing_is_reserved_and_unused(
    *, is_crowded: bool
) -> None:
    """With room for all that comes, and where some make room for others."""
    found = traces() or {"made up": made_up_lengths()}
    for name, lengths in found.items():
        small_blocks = SMALL_POOL_BLOCKS.get(name, SMALL_POOL_BLOCKS["azure"])
        num_blocks = small_blocks if is_crowded else LARGE_POOL_BLOCKS
        waste = replay(lengths[:NUM_REQUESTS], num_blocks)
        assert waste.unused_pct < MAX_WASTE_PCT, name
        assert waste.num_preempted > 0 or not is_crowded, name
