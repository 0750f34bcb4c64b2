"""An answer as a command received it, whole or in part, and its form for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from protocol.messages import Accepted, End, TokenLogprob, Tokens

if TYPE_CHECKING:
    from protocol.errors import ProtocolError, RequestError
    from protocol.exchange import Event


@dataclass(slots=True, kw_only=True)
class Received:
    """What has arrived of the answer."""

    began_s: float
    accepted: Accepted | None = None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ttft_ms: float | None = None
    end: End | None = None
    error: ProtocolError | RequestError | None = None

    def add(self, event: Event, *, now_s: float) -> None:
        """Take the next event, read at `now_s` of the clock that `began_s` is of."""
        match event:
            case Accepted():
                self.accepted = event
            case Tokens():
                if self.ttft_ms is None:
                    self.ttft_ms = round((now_s - self.began_s) * 1e3, 3)
                self.ids += event.ids
                self.texts.append(event.text)
                self.logprobs += event.logprobs or ()
            case End():
                self.end = event

    def as_json(self) -> dict[str, object]:
        """Return the answer; without END its reason is `error`, and nothing is made up."""
        timings = self.end.timings_ms if self.end else None
        accepted = self.accepted
        extra: dict[str, object] = {}
        if self.error is not None:
            extra["error"] = describe_error(self.error)
        if self.logprobs:
            extra["logprobs"] = msgspec.to_builtins(self.logprobs)
        return extra | {
            "id": accepted.id if accepted else None,
            "text": "".join(self.texts),
            "tokens": self.ids,
            "reason": self.end.reason if self.end else "error",
            "usage": msgspec.to_builtins(self.end.usage)
            if self.end
            else {
                "prompt_tokens": accepted.prompt_tokens if accepted else None,
                "cached_tokens": accepted.cached_tokens if accepted else None,
                "completion_tokens": len(self.ids),
            },
            "timings_ms": {
                "queue": timings.queue if timings else None,
                "prefill": timings.prefill if timings else None,
                "ttft": self.ttft_ms,
                "handoff": msgspec.to_builtins(timings.handoff) if timings else None,
                "decode": timings.decode if timings else None,
                "total": timings.total if timings else None,
                "device": msgspec.to_builtins(timings.device) if timings else None,
            },
        }


def describe_error(error: ProtocolError | RequestError) -> dict[str, object]:
    """Return what a program needs to decide whether to ask again."""
    return {
        "code": error.code,
        "message": str(error),
        "retryable": error.retryable,
        "retry_after_ms": getattr(error, "retry_after_ms", 0),
    }
