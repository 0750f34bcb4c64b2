"""A request's spans, as a collector receives them over HTTP from a real pair."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from protocol.errors import RequestError
from tests.support.pair import Pair, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_S = 30.0

Received = queue.SimpleQueue[tuple[str, str, object]]
"""(service, name, span) of each span."""


@contextmanager
def collector() -> Iterator[tuple[str, Received]]:
    """Listen as an OTLP collector does; yields its URL and what it received."""
    received: Received = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for group in request.resource_spans:
                service = next(
                    item.value.string_value
                    for item in group.resource.attributes
                    if item.key == "service.name"
                )
                for scope in group.scope_spans:
                    for span in scope.spans:
                        received.put((service, span.name, span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_every_stage_of_a_request_is_a_span_of_its_daemon(tmp_path: Path) -> None:
    """An answer's trace comes from decoded and holds prefilld's stages; a refusal has none."""
    with collector() as (url, received):
        with Pair(
            tmp_path, model=write_tiny_model(tmp_path), settings={"trace.endpoint": url}
        ) as pair:
            pair.client.generate([5, 6, 7] * 20, max_tokens=20, ignore_eos=True, id="traced")
            with pytest.raises(RequestError):
                pair.client.generate([5] * 5000, max_tokens=20)
            pair.wait_settled()
        spans = {}
        while not received.empty():  # the pair has ended: everything was flushed
            service, name, span = received.get(timeout=DEADLINE_S)
            spans[name] = (service, span)
    assert {name: service for name, (service, _) in spans.items()} == {
        "request": "decoded",
        "queue": "prefilld",
        "prefill": "prefilld",
        "handoff": "prefilld",
        "pull": "decoded",
        "first step": "decoded",
        "decode": "decoded",
    }
    (_, root) = spans.pop("request")
    assert "traced" in str(root.attributes)
    assert all(span.parent_span_id == root.span_id for _, span in spans.values())
    assert all(
        root.start_time_unix_nano
        <= span.start_time_unix_nano
        <= span.end_time_unix_nano
        <= root.end_time_unix_nano
        for _, span in spans.values()
    )


def test_a_collector_that_is_away_costs_no_request(tmp_path: Path) -> None:
    """Spans are dropped, requests are answered, and the daemons end in time."""
    with collector() as (url, _):
        pass  # nobody listens there any more
    with Pair(tmp_path, model=write_tiny_model(tmp_path), settings={"trace.endpoint": url}) as pair:
        for _ in range(20):
            assert len(pair.client.generate([5, 6], max_tokens=3, ignore_eos=True).ids) == 3
        pair.wait_settled()
        decoded = pair.process("decoded")
    assert decoded.returncode == 0
