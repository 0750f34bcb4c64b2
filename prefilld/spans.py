"""A request that ends at prefilld, as a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.tracing import RequestTrace, reached_stages

if TYPE_CHECKING:
    from prefilld.request import Request


def trace_of(
    request: Request, ended_ns: int, *, reason: str | None = None, error_code: str | None = None
) -> RequestTrace:
    """Return the trace of a request; it got END with a reason, or ERROR with a code."""
    points = [
        ("queue", "prefilld", request.arrived_ns),
        ("prefill", "prefilld", request.started_ns),
        ("handoff", "prefilld", request.first_token_ns),
    ]
    return RequestTrace(
        request_id=request.id,
        arrived_ns=request.arrived_ns,
        ended_ns=ended_ns,
        stages=reached_stages(points, ended_ns),
        attributes={
            "kvpair.reason": reason or "error",
            "gen_ai.usage.input_tokens": len(request.prompt.ids),
            "kvpair.cached_tokens": request.cached_tokens,
            "gen_ai.usage.output_tokens": len(request.answer_ids),
        },
        error_code=error_code,
    )
