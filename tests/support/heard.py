"""What a client of `kvpair bench` may have heard, made up to the millisecond."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from protocol.errors import RequestError
from protocol.messages import DeviceTimings, End, HandoffTimings, Timings, Usage
from shared.cli.bench_plan import Ask
from shared.cli.bench_stream import Failure, Heard
from shared.clock import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Sequence


def heard(
    tokens_ms: Sequence[float],
    *,
    due_ms: float = 0.0,
    sent_ms: float | None = None,
    known_ms: float = 0.0,
    prefill_ms: float = 0.0,
    handoff: HandoffTimings | None = None,
    device: DeviceTimings | None = None,
    cached_tokens: int = 0,
    is_cut: bool = False,
) -> Heard:
    """Return a request whose tokens came at these moments.

    Args:
        tokens_ms: When; two that are the same came in one frame.
        due_ms: When it was due.
        sent_ms: When it was sent; by default when it was due.
        known_ms: When prefilld knew the first token.
        prefill_ms: How long before that it had begun to compute the prompt.
        handoff: Stages that the daemons told.
        device: What GPUs took of them.
        cached_tokens: Of ten in the prompt.
        is_cut: Whether there is no END.
    """
    end = End(
        reason="length",
        usage=Usage(
            prompt_tokens=10, cached_tokens=cached_tokens, completion_tokens=len(tokens_ms)
        ),
        timings_ms=Timings(
            queue=1.0,
            prefill=prefill_ms,
            decode=0.0,
            total=0.0,
            first_token_ns=round(known_ms * NS_PER_MS),
            handoff=handoff,
            device=device,
        ),
    )
    return Heard(
        ask=Ask(num_prompt_tokens=10, num_tokens=len(tokens_ms), seed=1),
        due_ns=round(due_ms * NS_PER_MS),
        sent_ns=round((due_ms if sent_ms is None else sent_ms) * NS_PER_MS),
        token_ns=array("q", [round(at_ms * NS_PER_MS) for at_ms in tokens_ms]),
        end=None if is_cut else end,
        is_cut=is_cut,
    )


def failed(code: str) -> Heard:
    """Return a request that was refused."""
    error = RequestError(code, f"it is {code}")
    ask = Ask(num_prompt_tokens=10, num_tokens=1, seed=1)
    return Heard(ask=ask, failure=Failure.of(error))
