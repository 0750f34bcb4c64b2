"""A request's stages as OpenTelemetry spans: off unless an endpoint is configured.

Whoever ends a request knows all its stages, since their times travel with it, and tells them at
once: one root span, and under it one for each stage, by the daemon in which it passed.  The ids
follow from the request, so both daemons would name the same.  Spans leave through OpenTelemetry's
own bounded queue and thread; nobody waits for a collector, and what it does not take is dropped.

The libraries are the extra `otel`, and are imported only where they are used.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from shared.errors import ConfigError, EnvironmentUnsupportedError
from shared.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

NAMESPACE = "kvpair"
"""`service.namespace`; each daemon's name is its `service.name`."""

ROOT_SPAN = "request"

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8

EXPORT_TIMEOUT_S = 5
"""For one batch; what a collector does not take by then is dropped."""

FLUSH_S = 2.0
"""For the last spans when the daemon ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a request's life; times are CLOCK_MONOTONIC in ns."""

    name: str
    daemon: str
    """Where it passed."""
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """A request that has ended; times are CLOCK_MONOTONIC in ns."""

    request_id: str
    arrived_ns: int
    ended_ns: int
    stages: Sequence[Stage]
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    error_code: str | None = None
    """The code of the ERROR that its client was sent; None where it got its answer."""


class Tracer(Protocol):
    """Where traces go."""

    def record(self, trace: RequestTrace) -> None:
        """Take a trace.  Never blocks, never raises."""

    def shutdown(self) -> None:
        """Send what waits, for at most `FLUSH_S`, and end."""


class NoTracer:
    """Takes nothing: tracing is off."""

    def record(self, trace: RequestTrace) -> None:
        """Drop a trace."""

    def shutdown(self) -> None:
        """Do nothing."""


def reached_stages(points: Sequence[tuple[str, str, int]], ended_ns: int) -> list[Stage]:
    """Return the stages of a request from the times at which each began.

    Args:
        points: (name, daemon, begin in ns) in their order; 0 where a stage was not reached.
        ended_ns: When the last one ended.

    A stage ends where the next one begins that was reached.  A copy that ran beside prefill
    counts from the moment at which prefill no longer hid it.
    """
    reached = [point for point in points if point[2]]
    stages: list[Stage] = []
    end_ns = ended_ns
    for name, daemon, begin_ns in reversed(reached):
        begin_ns = min(begin_ns, end_ns)  # noqa: PLW2901  it may have begun before its turn
        stages.append(Stage(name=name, daemon=daemon, begin_ns=begin_ns, end_ns=end_ns))
        end_ns = begin_ns
    return stages[::-1]


def open_tracer(endpoint: str | None, *, daemon: str) -> Tracer:
    """Return where a daemon's traces go.

    Args:
        endpoint: URL of an OTLP collector over HTTP, `http://127.0.0.1:4318/v1/traces`; None for
            none.
        daemon: Whose traces they are.

    Raises:
        ConfigError: It is no such URL.
        EnvironmentUnsupportedError: The extra `otel` is not installed.
    """
    if endpoint is None:
        return NoTracer()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"trace.endpoint = {endpoint!r} is no URL of a collector",
            hint="as http://127.0.0.1:4318/v1/traces",
        )
    try:
        exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ImportError as error:
        raise EnvironmentUnsupportedError(
            f"trace.endpoint is set, and OpenTelemetry is not installed ({error.name})",
            hint="install kvpair's extra `otel`, or leave trace.endpoint out",
        ) from error
    exporter = exporters.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return OtelTracer(export.BatchSpanProcessor(exporter), daemon=daemon)


class OtelTracer:
    """Turns traces into spans.

    Args:
        processor: Takes finished spans; OpenTelemetry's batch processor queues them.
        daemon: Who ends the requests.
        wall_clock_ns: Spans are told in wall-clock time; read once for each trace.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        daemon: str,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._processor, self._daemon = processor, daemon
        self._wall_clock_ns, self._monotonic_ns = wall_clock_ns, monotonic_ns
        self._sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        self._api: Any = importlib.import_module("opentelemetry.trace")
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        self._resources = {
            name: resources.Resource(
                {
                    "service.name": name,
                    "service.namespace": NAMESPACE,
                    "service.version": __version__,
                }
            )
            for name in ("prefilld", "decoded")
        }

    def record(self, trace: RequestTrace) -> None:
        """Queue a trace's spans."""
        offset_ns = self._wall_clock_ns() - self._monotonic_ns()
        seed = f"{trace.request_id} {trace.arrived_ns}"
        trace_id = _number(seed, TRACE_ID_BYTES)
        root = self._context(trace_id, _number(f"{seed} {ROOT_SPAN}", SPAN_ID_BYTES))
        for stage in trace.stages:
            context = self._context(trace_id, _number(f"{seed} {stage.name}", SPAN_ID_BYTES))
            self._end(
                stage.name,
                context,
                parent=root,
                daemon=stage.daemon,
                start_time=stage.begin_ns + offset_ns,
                end_time=stage.end_ns + offset_ns,
            )
        is_failed = trace.error_code is not None
        codes = self._api.StatusCode
        self._end(
            ROOT_SPAN,
            root,
            parent=None,
            daemon=self._daemon,
            start_time=trace.arrived_ns + offset_ns,
            end_time=trace.ended_ns + offset_ns,
            kind=self._api.SpanKind.SERVER,
            attributes={"kvpair.request_id": trace.request_id, **trace.attributes},
            status=self._api.Status(codes.ERROR if is_failed else codes.OK, trace.error_code),
        )

    def shutdown(self) -> None:
        """Send what waits, for at most `FLUSH_S`: a collector may hang, and nobody waits for it."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)

    def _context(self, trace_id: int, span_id: int) -> object:
        return self._api.SpanContext(
            trace_id, span_id, is_remote=False, trace_flags=self._api.TraceFlags(0x01)
        )

    def _end(
        self, name: str, context: object, *, parent: object, daemon: str, **fields: object
    ) -> None:
        span: ReadableSpan = self._sdk.ReadableSpan(
            name, context=context, parent=parent, resource=self._resources[daemon], **fields
        )
        self._processor.on_end(span)


def _number(text: str, num_bytes: int) -> int:
    """Return a number that follows from a text; never 0, which means none."""
    digest = hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1
