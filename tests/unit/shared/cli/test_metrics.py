"""`kvpair metrics`: two scrapes as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import Message, Metrics, MetricsRequest, Status
from shared.cli.metrics import merge
from shared.metrics import Metrics as Registry
from tests.support.exposition import Exposition

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair, Peer, Script, Serve


def exposition(daemon: str, count: int) -> str:
    registry = Registry(daemon)
    registry.counter("kvpair_requests_total", "Requests.", ["reason"]).labels("stop").inc(count)
    registry.distribution(f"kvpair_{daemon}_seconds", "Time.").observe(1.0)
    return registry.exposition()


def telling(text: str) -> Script:
    """Answer METRICS with a text, and STATUS as a daemon does whose peer lies beside it."""

    def script(peer: Peer) -> None:
        asked: Message | None = peer.receive()
        is_metrics = isinstance(asked, MetricsRequest)
        peer.send(Metrics(text=text) if is_metrics else Status(status={}))

    return script


def test_both_are_one_scrape_that_parses(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling(exposition("prefilld", 2)))
    serve(telling(exposition("decoded", 3)), name="decoded")
    code, output, errors = kvpair("metrics")
    assert (code, errors) == (0, "")
    scrape = Exposition(output)
    assert scrape.by_label("kvpair_requests_total", "daemon") == {"prefilld": 2, "decoded": 3}
    assert output.count("# TYPE kvpair_requests_total counter") == 1
    assert scrape["kvpair_prefilld_seconds_count"] == scrape["kvpair_decoded_seconds_count"] == 1


def test_one_can_be_asked_alone(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling(exposition("decoded", 3)), name="decoded")
    code, output, errors = kvpair("metrics", "--daemon", "decoded")
    assert (code, errors) == (0, "")
    assert Exposition(output).by_label("kvpair_requests_total", "daemon") == {"decoded": 3}


def test_one_that_is_away_does_not_hide_the_other(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling(exposition("decoded", 3)), name="decoded")
    code, output, errors = kvpair("metrics")
    assert code == 69
    assert 'kvpair_requests_total{daemon="decoded",reason="stop"} 3.0' in output
    assert errors.startswith("kvpair: prefilld: no socket at")


def test_a_family_that_both_have_stands_together() -> None:
    """Prometheus refuses a name whose series are scattered."""
    merged = merge([exposition("prefilld", 1), exposition("decoded", 1)]).splitlines()
    places = [at for at, line in enumerate(merged) if line.startswith("kvpair_requests_total")]
    assert places == [places[0], places[0] + 1]
    assert merge([]) == ""
