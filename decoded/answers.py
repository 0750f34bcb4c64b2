"""What a client is told at the end of its answer, built from a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocol import messages as wire
from shared.clock import NS_PER_MS

if TYPE_CHECKING:
    from decoded.sequence import Sequence

US_PER_MS = 1_000


def end_of(sequence: Sequence, reason: str, now_ns: int) -> wire.End:
    """Return END; stages of the hand-off that were not reached are given as now."""
    state = sequence.state
    return wire.End(
        reason=reason,
        usage=wire.Usage(
            prompt_tokens=state.prompt_tokens,
            cached_tokens=state.cached_tokens,
            completion_tokens=sequence.completion_tokens,
        ),
        timings_ms=wire.Timings(
            queue=(state.started_ns - state.arrived_ns) / NS_PER_MS,
            prefill=(state.first_token_ns - state.started_ns) / NS_PER_MS,
            decode=(now_ns - state.first_token_ns) / NS_PER_MS,
            total=(now_ns - state.arrived_ns) / NS_PER_MS,
            first_token_ns=state.first_token_ns,
            handoff=_handoff_timings(sequence, now_ns),
            device=_device_timings(sequence),
        ),
    )


def stages_us(sequence: Sequence, now_ns: int) -> dict[str, int]:
    """Return what END will tell of the hand-off, as one line of a log has it."""
    told: dict[str, float | None] = msgspec.structs.asdict(_handoff_timings(sequence, now_ns))
    device = _device_timings(sequence)
    if device is not None:
        told |= {f"device_{name}": ms for name, ms in msgspec.structs.asdict(device).items()}
    return {f"{name}_us": round(ms * US_PER_MS) for name, ms in told.items() if ms is not None}


def _handoff_timings(sequence: Sequence, now_ns: int) -> wire.HandoffTimings:
    state, times = sequence.state, sequence.times

    def since_first_token(reading_ns: int) -> float:
        # A copy may have begun, or even ended, while prefill still ran: that is 0.
        return max(0, (reading_ns or now_ns) - state.first_token_ns) / NS_PER_MS

    return wire.HandoffTimings(
        ready=since_first_token(times.sent_ns),
        adopted=since_first_token(times.adopted_ns),
        copy_start=since_first_token(times.copy_start_ns),
        copy_done=since_first_token(times.copy_done_ns),
        first_step=since_first_token(times.first_step_ns),
    )


def _device_timings(sequence: Sequence) -> wire.DeviceTimings | None:
    times = sequence.times
    readings_ns = {
        "prefill": sequence.state.prefill_device_ns,
        "pull": times.pull_device_ns,
        "last_pull": times.last_pull_device_ns,
        "first_step": times.first_step_device_ns,
    }
    told = {stage: ns / NS_PER_MS for stage, ns in readings_ns.items() if ns is not None}
    return wire.DeviceTimings(**told) if told else None
