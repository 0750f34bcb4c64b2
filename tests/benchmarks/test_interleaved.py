"""The stopwatch of the benchmarks, against a clock that moves only when work is done."""

from __future__ import annotations

import pytest

from tests.benchmarks.interleaved import time_interleaved


def test_runs_take_turns_and_the_ratio_is_that_of_pairs() -> None:
    """The order flips each time, and the unmeasured first runs leave no trace in the result."""
    now_s, ran = 0.0, ""

    def work(name: str, seconds: float) -> None:
        nonlocal now_s, ran
        now_s, ran = now_s + seconds, ran + name

    result = time_interleaved(
        lambda: work("b", 3.0), lambda: work("c", 2.0), num_pairs=3, clock_s=lambda: now_s
    )
    assert ran == "bc" + "bc" + "cb" + "bc"
    assert result.ratios == pytest.approx([1.5, 1.5, 1.5])
    assert result.describe(num_tokens=12) == (
        "4.0 against 6.0 tokens/s; ratio 1.50 (median of 3 pairs, 1.50 to 1.50)"
    )
