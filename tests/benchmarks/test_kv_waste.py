"""The replay of lengths: what it counts, and that nothing of a pool is left behind."""

from __future__ import annotations

import pytest

from tests.benchmarks.kv_waste import BLOCK_SIZE, replay


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
