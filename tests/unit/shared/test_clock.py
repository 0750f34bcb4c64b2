"""`shared.clock`: the kernel's monotonic clock, and one that tests move."""

from __future__ import annotations

import time

import pytest

from shared.clock import Clock, FakeClock, SystemClock, whole_us


def test_the_system_clock_reads_clock_monotonic() -> None:
    """Both daemons share that clock; another one would make their timings nonsense."""
    clock: Clock = SystemClock()
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before <= clock.monotonic_ns() <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def test_a_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(start_ns=5)
    assert clock.monotonic_ns() == clock.monotonic_ns() == 5
    clock.advance(1.5)
    assert clock.monotonic_ns() == 1_500_000_005


def test_a_fake_clock_never_goes_back() -> None:
    with pytest.raises(ValueError, match=r"cannot go back by 0\.1 s"):
        FakeClock().advance(-0.1)


def test_a_log_tells_whole_microseconds_or_none() -> None:
    assert [whole_us(duration_ns) for duration_ns in (None, 0, 999, 1_500_000)] == [
        None, 0, 0, 1_500
    ]  # fmt: skip
