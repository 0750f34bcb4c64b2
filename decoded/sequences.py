"""The book of adopted requests: which of them live, and how each one ends.

A sequence ends only between two turns; whatever comes meanwhile, CANCEL or a client that goes away,
only marks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.answers import end_of, stages_us
from decoded.spans import trace_of
from protocol import messages as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.stream import ClientStream
    from shared.service.frame import Service


class SequenceBook:
    """Adopted sequences, and the connections that are open.

    Args:
        service: Configuration, clock, log.
        scheduler: Where a sequence's blocks go back to.
        decode: Turns ids into text, for logs where they are wanted.
        on_work: Called when something waits for the next turn.
    """

    def __init__(
        self,
        *,
        service: Service,
        scheduler: Scheduler[Sequence],
        metrics: DecodeMetrics,
        decode: Callable[[list[int]], str],
        on_work: Callable[[], None],
    ) -> None:
        self._service, self._scheduler, self._metrics = service, scheduler, metrics
        self._decode, self._on_work = decode, on_work
        self._living: dict[Sequence, None] = {}  # a set that keeps the order of adoption
        self._streams: dict[ClientStream, str] = {}
        """Connections that are open, those of ended sequences too, with their requests' ids."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is adopted and every client has its last byte."""
        return not self._living and not self._streams

    @property
    def living(self) -> tuple[Sequence, ...]:
        """Sequences that have not ended, in the order of adoption."""
        return tuple(self._living)

    @property
    def unsent_since_s(self) -> list[float | None]:
        """For each open connection, since when its client takes nothing of what waits for it."""
        return [stream.unsent_since_s for stream in self._streams]

    def is_living(self, sequence: Sequence) -> bool:
        """Whether a sequence has not ended."""
        return sequence in self._living

    def add(self, sequence: Sequence) -> None:
        """Take note of an adopted sequence."""
        self._living[sequence] = None
        self._streams[sequence.stream] = sequence.state.id

    def cancel(self, sequence: Sequence) -> None:
        """Have a sequence end before the next turn."""
        sequence.is_cancelled = True
        self._on_work()

    def client_gone(self, sequence: Sequence) -> None:
        """A connection ended, by whom ever; what it belonged to is cancelled."""
        self._streams.pop(sequence.stream, None)
        self.cancel(sequence)

    def tell_stages(self, sequence: Sequence) -> None:
        """Log where the time of a hand-off went, now that its first step is over."""
        self._service.log.info(
            "handoff.measured",
            request_id=sequence.state.id,
            lease_id=sequence.lease_id,
            **stages_us(sequence, self._service.clock.monotonic_ns()),
        )

    def end(self, sequence: Sequence, reason: str) -> None:
        """Send END and free the blocks; only between turns."""
        is_gone = sequence.stream.is_closed
        self._metrics.ended.labels("gone" if is_gone else reason).inc()
        self._service.log.info(
            "request.ended",
            request_id=sequence.state.id,
            reason="gone" if is_gone else reason,
            completion_tokens=sequence.completion_tokens,
        )
        if self._service.config.log.prompts:
            ids = [*sequence.state.ids, *sequence.new_ids]
            self._service.log.info(
                "request.answer", request_id=sequence.state.id, text=self._decode(ids)
            )
        self._forget(sequence)
        now_ns = self._service.clock.monotonic_ns()
        sequence.stream.finish(end_of(sequence, reason, now_ns))
        self._service.tracer.record(trace_of(sequence, now_ns, reason=reason))

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """Send ERROR and free the blocks; the client may ask again.  Only between turns."""
        self._metrics.failed.labels(code).inc()
        self._service.log.warning(
            "request.failed", request_id=sequence.state.id, code=code, reason=message
        )
        self._forget(sequence)
        sequence.stream.finish(wire.Error(code=code, message=message, retryable=True))
        now_ns = self._service.clock.monotonic_ns()
        self._service.tracer.record(trace_of(sequence, now_ns, error_code=code))

    def close_stalled(self, now_s: float) -> None:
        """Cut off clients that take nothing: they hold blocks that others wait for."""
        timeout_s = self._service.config.limits.client_stall_timeout_s
        for stream, request_id in tuple(self._streams.items()):
            if stream.is_stalled(now_s, timeout_s):
                self._service.log.warning(
                    "client.stalled", request_id=request_id, timeout_s=timeout_s
                )
                stream.close()

    def _forget(self, sequence: Sequence) -> None:
        del self._living[sequence]
        sequence.has_ended = True
        if sequence.has_started:  # else its blocks are still its lease's
            self._scheduler.finish(sequence)
