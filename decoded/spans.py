"""A request that ends at decoded, as a trace: prefilld's stages came with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.tracing import RequestTrace, reached_stages

if TYPE_CHECKING:
    from decoded.sequence import Sequence


def trace_of(
    sequence: Sequence, ended_ns: int, *, reason: str | None = None, error_code: str | None = None
) -> RequestTrace:
    """Return the trace of a request; it got END with a reason, or ERROR with a code."""
    state, times = sequence.state, sequence.times
    points = [
        ("queue", "prefilld", state.arrived_ns),
        ("prefill", "prefilld", state.started_ns),
        ("handoff", "prefilld", state.first_token_ns),
        ("pull", "decoded", times.adopted_ns),
        ("first step", "decoded", times.copy_done_ns),
        ("decode", "decoded", times.first_step_ns),
    ]
    return RequestTrace(
        request_id=state.id,
        arrived_ns=state.arrived_ns,
        ended_ns=ended_ns,
        stages=reached_stages(points, ended_ns),
        attributes={
            "kvpair.reason": reason or "error",
            "kvpair.lease_id": sequence.lease_id,
            "gen_ai.usage.input_tokens": state.prompt_tokens,
            "kvpair.cached_tokens": state.cached_tokens,
            "gen_ai.usage.output_tokens": sequence.completion_tokens,
        },
        error_code=error_code,
    )
