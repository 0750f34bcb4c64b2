"""What a client is told by prefilld, built from a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as wire
from shared.clock import NS_PER_MS

if TYPE_CHECKING:
    from prefilld.request import Request
    from shared.model.answer import Piece


def piece_message(piece: Piece, logprobs: list[wire.TokenLogprob] | None = None) -> wire.Tokens:
    """Return the TOKENS frame of a piece that is not empty.

    Args:
        piece: What may leave.
        logprobs: One for each of its ids, where the request asked.
    """
    return wire.Tokens(index=piece.index, ids=piece.ids, text=piece.text, logprobs=logprobs)


def end_of(request: Request, reason: str, now_ns: int) -> wire.End:
    """Return END for an answer that ends at prefilld; stages that were not reached take 0 ms."""
    started_ns = request.started_ns or now_ns
    first_token_ns = request.first_token_ns or now_ns
    return wire.End(
        reason=reason,
        usage=wire.Usage(
            prompt_tokens=len(request.prompt.ids),
            cached_tokens=request.cached_tokens,
            completion_tokens=len(request.answer_ids),
        ),
        timings_ms=wire.Timings(
            queue=(started_ns - request.arrived_ns) / NS_PER_MS,
            prefill=(first_token_ns - started_ns) / NS_PER_MS,
            decode=(now_ns - first_token_ns) / NS_PER_MS,
            total=(now_ns - request.arrived_ns) / NS_PER_MS,
            first_token_ns=request.first_token_ns,
            device=_device_timings(request),
        ),
    )


def _device_timings(request: Request) -> wire.DeviceTimings | None:
    device_ns = request.prefill_device_ns
    return None if device_ns is None else wire.DeviceTimings(prefill=device_ns / NS_PER_MS)
