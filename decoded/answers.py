"""What a client is told at the end of its answer, built from a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as wire

if TYPE_CHECKING:
    from decoded.sequence import Sequence

NS_PER_MS = 1_000_000


def end_of(sequence: Sequence, reason: str, now_ns: int) -> wire.End:
    """Return END; stages of the hand-off that were not reached are given as now."""
    state, times = sequence.state, sequence.times

    def since_first_token(reading_ns: int) -> float:
        # A copy may have begun, or even ended, while prefill still ran: that is 0.
        return max(0, (reading_ns or now_ns) - state.first_token_ns) / NS_PER_MS

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
            handoff=wire.HandoffTimings(
                ready=since_first_token(times.sent_ns),
                adopted=since_first_token(times.adopted_ns),
                copy_start=since_first_token(times.copy_start_ns),
                copy_done=since_first_token(times.copy_done_ns),
                first_step=since_first_token(times.first_step_ns),
            ),
        ),
    )
