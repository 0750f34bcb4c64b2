"""`shared.metrics`: names that keep the rules, one registry a daemon, two ways to read it."""

from __future__ import annotations

import pytest

from shared.metrics import Metrics


def test_snapshot_holds_the_counters_and_nothing_else() -> None:
    """STATUS tells counts; distributions and gauges are for METRICS."""
    metrics = Metrics()
    metrics.counter("kvpair_requests_total", "Requests.", ["outcome"]).labels("ok").inc(2)
    metrics.counter_from("kvpair_log_dropped_lines_total", "Lost lines.", lambda: 7)
    metrics.gauge("kvpair_pool_free_blocks", "Free blocks.").set(3)
    metrics.histogram("kvpair_step_seconds", "Steps.").observe(0.1)
    assert metrics.snapshot() == {
        'kvpair_requests_total{outcome="ok"}': 2,
        "kvpair_log_dropped_lines_total": 7,
    }


def test_exposition_is_prometheus_text_with_help_and_types() -> None:
    metrics = Metrics()
    metrics.counter("kvpair_requests_total", "Requests.").inc()
    metrics.counter_from("kvpair_log_dropped_lines_total", "Lost lines.", lambda: 7)
    metrics.gauge_from("kvpair_oldest_wait_seconds", "Oldest wait.", lambda: 1.5)
    text = metrics.exposition()
    assert "# TYPE kvpair_requests_total counter" in text
    assert "kvpair_requests_total 1.0" in text
    assert "kvpair_log_dropped_lines_total 7.0" in text
    assert "kvpair_oldest_wait_seconds 1.5" in text
    assert "_created" not in text


def test_two_registries_share_nothing() -> None:
    """Tests run both daemons in one process; their counts must not meet."""
    first, second = Metrics(), Metrics()
    first.counter("kvpair_requests_total", "Requests.").inc()
    second.counter("kvpair_requests_total", "Requests.")
    assert second.snapshot() == {"kvpair_requests_total": 0}


def test_a_name_is_declared_once() -> None:
    metrics = Metrics()
    metrics.gauge("kvpair_pool_free_blocks", "Free blocks.")
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        metrics.gauge("kvpair_pool_free_blocks", "Free blocks.")


@pytest.mark.parametrize("name", ["requests_total", "kvpair_Requests_total", "kvpair", "kvpair__x"])
def test_a_name_outside_the_rules_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not of the form kvpair_thing_unit"):
        Metrics().gauge(name, "Wrong.")


def test_counters_and_only_they_end_in_total() -> None:
    with pytest.raises(ValueError, match="end in _total"):
        Metrics().counter("kvpair_requests", "Wrong.")
    with pytest.raises(ValueError, match="end in _total"):
        Metrics().gauge("kvpair_blocks_total", "Wrong.")
