"""How long work takes a device, by events; and that it is nobody's time where no device works."""

from __future__ import annotations

import pytest
import torch

from shared.engine.device_stream import DeviceStream
from shared.engine.device_timing import DeviceTimer, add_device_ns
from tests.support.timed_stream import FakeDevice

MS = 1_000_000


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def timer(device: FakeDevice) -> DeviceTimer:
    return DeviceTimer(device.new_event, device)


def test_only_what_lies_within_a_timing_counts(device: FakeDevice, timer: DeviceTimer) -> None:
    """What is enqueued before it and behind it is somebody else's."""
    device.work(30)
    timing = timer.begin()
    device.work(2)
    timing.split()
    device.work(0.5)
    timing.end()
    device.work(70)
    device.run()
    assert (timing.split_ns(), timing.device_ns()) == (2 * MS, 2.5 * MS)


def test_a_timing_is_passed_when_the_device_got_to_its_end(
    device: FakeDevice, timer: DeviceTimer
) -> None:
    """It is a mark as well, so that nothing else need be recorded there."""
    timing = timer.begin()
    device.run()
    device.work(3)
    timing.end()
    assert not timing.is_passed()
    device.run()
    assert timing.is_passed()


def test_a_wait_ends_with_the_work(device: FakeDevice, timer: DeviceTimer) -> None:
    timing = timer.begin()
    device.work(3)
    timing.end()
    timing.wait()
    assert (timing.is_passed(), timing.device_ns(), timing.split_ns()) == (True, 3 * MS, None)


def test_readings_outlive_the_events_that_others_use_now(
    device: FakeDevice, timer: DeviceTimer
) -> None:
    """A timing that was read stays passed, and says the same again."""
    first = timer.begin()
    device.work(3)
    first.end()
    device.run()
    assert first.device_ns() == 3 * MS
    second = timer.begin()
    device.work(8)
    second.end()
    assert len(device.events) == 2, "events are used again"
    assert first.is_passed()
    first.wait()
    assert not second.is_passed(), "nobody waits for a timing that is over"
    device.run()
    assert (first.device_ns(), second.device_ns()) == (3 * MS, 8 * MS)


def test_timings_that_are_out_at_once_share_no_event(
    device: FakeDevice, timer: DeviceTimer
) -> None:
    timings = []
    for duration_ms in (1, 2):
        timings.append(timer.begin())
        device.work(duration_ms)
        timings[-1].end()
    device.run()
    assert [timing.device_ns() for timing in timings] == [1 * MS, 2 * MS]
    assert len(device.events) == 4


def test_what_a_cpu_does_has_no_device_s_time() -> None:
    """It is none, and not a number that the host made up."""
    timing = DeviceStream(torch.device("cpu")).begin_timing()
    timing.split()
    timing.end()
    timing.wait()
    assert (timing.is_passed(), timing.device_ns(), timing.split_ns()) == (True, None, None)


@pytest.mark.parametrize(
    ("total_ns", "more_ns", "expected_ns"),
    [(None, None, None), (None, 4, 4), (3, None, 3), (3, 4, 7), (0, 4, 4)],
)
def test_device_times_add_up_over_what_has_none(
    total_ns: int | None, more_ns: int | None, expected_ns: int | None
) -> None:
    assert add_device_ns(total_ns, more_ns) == expected_ns
