"""`shared.tracing`: stages that follow each other, and spans that OpenTelemetry's own SDK takes."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shared.errors import ConfigError, EnvironmentUnsupportedError
from shared.tracing import (
    NoTracer,
    OtelTracer,
    RequestTrace,
    Stage,
    open_tracer,
    reached_stages,
)

EPOCH_NS = 1_800_000_000_000_000_000


def stages(*points: tuple[str, int], ended_ns: int = 100) -> list[tuple[str, int, int]]:
    found = reached_stages([(name, "decoded", begin_ns) for name, begin_ns in points], ended_ns)
    return [(stage.name, stage.begin_ns, stage.end_ns) for stage in found]


def test_a_stage_ends_where_the_next_begins() -> None:
    assert stages(("queue", 10), ("prefill", 30), ("decode", 60)) == [
        ("queue", 10, 30), ("prefill", 30, 60), ("decode", 60, 100)
    ]  # fmt: skip


def test_a_stage_that_was_not_reached_is_left_out() -> None:
    assert stages(("queue", 10), ("prefill", 0), ("decode", 0)) == [("queue", 10, 100)]
    assert stages() == []


def test_a_copy_that_ended_before_its_turn_takes_no_time() -> None:
    """Blocks are pulled while prefill still runs: what was hidden is nobody's wait."""
    assert stages(("handoff", 50), ("pull", 60), ("first step", 55), ("decode", 70)) == [
        ("handoff", 50, 55), ("pull", 55, 55), ("first step", 55, 70), ("decode", 70, 100)
    ]  # fmt: skip


def trace(**changes: object) -> RequestTrace:
    known: dict[str, object] = {
        "request_id": "r1",
        "arrived_ns": 1000,
        "ended_ns": 9000,
        "stages": [
            Stage(name="prefill", daemon="prefilld", begin_ns=1000, end_ns=3000),
            Stage(name="decode", daemon="decoded", begin_ns=3000, end_ns=9000),
        ],
        "attributes": {"kvpair.reason": "stop"},
    }
    return RequestTrace(**(known | changes))  # type: ignore[arg-type]


def spans_of(*traces: RequestTrace) -> dict[str, object]:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(
        SimpleSpanProcessor(exporter),
        daemon="decoded",
        wall_clock_ns=lambda: EPOCH_NS + 5000,
        monotonic_ns=lambda: 5000,
    )
    for each in traces:
        tracer.record(each)
    tracer.shutdown()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_one_span_with_its_stages_below() -> None:
    spans: dict[str, object] = spans_of(trace())
    root, prefill, decode = spans["request"], spans["prefill"], spans["decode"]
    assert {span.context.trace_id for span in (root, prefill, decode)} == {root.context.trace_id}
    assert root.parent is None
    assert prefill.parent.span_id == decode.parent.span_id == root.context.span_id
    assert len({span.context.span_id for span in (root, prefill, decode)}) == 3
    assert (root.start_time, root.end_time) == (EPOCH_NS + 1000, EPOCH_NS + 9000)
    assert (decode.start_time, decode.end_time) == (EPOCH_NS + 3000, EPOCH_NS + 9000)
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.OK
    assert dict(root.attributes) == {"kvpair.request_id": "r1", "kvpair.reason": "stop"}
    assert prefill.resource.attributes["service.name"] == "prefilld"
    assert root.resource.attributes["service.namespace"] == "kvpair"


def test_a_failed_request_says_why() -> None:
    root = spans_of(trace(error_code="prefill-lost"))["request"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "prefill-lost")


def test_the_ids_follow_from_the_request() -> None:
    """Both daemons would name the same, and two requests never share one."""
    first, again = spans_of(trace())["request"], spans_of(trace())["request"]
    assert first.context.trace_id == again.context.trace_id
    later = spans_of(trace(arrived_ns=1001))["request"]
    assert later.context.trace_id != first.context.trace_id


def test_nothing_is_imported_where_nothing_is_configured() -> None:
    tracer = open_tracer(None, daemon="prefilld")
    assert isinstance(tracer, NoTracer)
    tracer.record(trace())
    tracer.shutdown()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x/", "http://", "/a/path"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a collector"):
        open_tracer(endpoint, daemon="prefilld")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(EnvironmentUnsupportedError, match="extra `otel`"):
        open_tracer("http://127.0.0.1:4318/v1/traces", daemon="prefilld")
