"""What a client is told at the end of its answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from decoded.answers import end_of, stages_us
from decoded.sequence import Sequence
from decoded.stream import ClientStream
from protocol import messages as wire
from protocol.codec import validate
from tests.unit.decoded.samples import HANDOFF, changed

MS = 1_000_000


def sequence_of(*, prefill_device_ns: int | None = None) -> Sequence:
    handoff = changed(
        HANDOFF,
        sent_ns=21 * MS,
        arrived_ns=10 * MS,
        started_ns=12 * MS,
        first_token_ns=20 * MS,
        prefill_device_ns=prefill_device_ns,
    )
    stream = cast("ClientStream", SimpleNamespace())
    sequence, _ = Sequence.adopt(
        handoff, stream=stream, token_bytes=lambda _: b"x", block_size=16, adopted_ns=22 * MS
    )
    return sequence


def test_an_end_tells_where_the_time_went_on_both_sides() -> None:
    sequence = sequence_of()
    sequence.push(50)
    sequence.times.copy_start_ns, sequence.times.copy_done_ns = 23 * MS, 25 * MS
    sequence.times.first_step_ns = 30 * MS
    end = validate(end_of(sequence, "stop", 40 * MS))
    assert end.reason == "stop"
    assert end.usage == wire.Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=2)
    assert end.timings_ms == wire.Timings(
        queue=2,
        prefill=8,
        decode=20,
        total=30,
        first_token_ns=20 * MS,
        handoff=wire.HandoffTimings(ready=1, adopted=2, copy_start=3, copy_done=5, first_step=10),
    )


def test_stages_that_were_not_reached_are_told_as_now() -> None:
    """It was cancelled before its blocks were there."""
    end = validate(end_of(sequence_of(), "cancelled", 24 * MS))
    assert end.timings_ms.handoff == wire.HandoffTimings(
        ready=1, adopted=2, copy_start=4, copy_done=4, first_step=4
    )


def test_a_copy_that_ran_ahead_of_the_first_token_took_no_time() -> None:
    sequence = sequence_of()
    sequence.times.copy_start_ns, sequence.times.copy_done_ns = 15 * MS, 19 * MS
    end = validate(end_of(sequence, "stop", 40 * MS))
    assert end.timings_ms.handoff is not None
    assert (end.timings_ms.handoff.copy_start, end.timings_ms.handoff.copy_done) == (0, 0)


def test_what_gpus_took_is_told_beside_the_stages() -> None:
    """Each by its own clock; a stage without one is left out of logs, and none of it is made up."""
    sequence = sequence_of(prefill_device_ns=7 * MS)
    times = sequence.times
    times.copy_start_ns, times.copy_done_ns, times.first_step_ns = 15 * MS, 23 * MS, 28 * MS
    times.pull_device_ns, times.last_pull_device_ns = 3 * MS, MS // 2
    told = validate(end_of(sequence, "stop", 40 * MS)).timings_ms
    assert told.device == wire.DeviceTimings(prefill=7, pull=3, last_pull=0.5)
    assert stages_us(sequence, 40 * MS) == {
        "ready_us": 1_000,
        "adopted_us": 2_000,
        "copy_start_us": 0,
        "copy_done_us": 3_000,
        "first_step_us": 8_000,
        "device_prefill_us": 7_000,
        "device_pull_us": 3_000,
        "device_last_pull_us": 500,
    }


def test_without_a_gpu_nothing_is_told_of_one() -> None:
    sequence = sequence_of()
    assert end_of(sequence, "stop", 40 * MS).timings_ms.device is None
    assert not any(name.startswith("device") for name in stages_us(sequence, 40 * MS))
