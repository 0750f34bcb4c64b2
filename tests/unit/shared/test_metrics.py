"""`shared.metrics`: names that keep the rules, one registry a daemon, two ways to read it."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

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


def test_one_value_counts_many_times_in_a_distribution() -> None:
    """A step makes all streams of its batch wait equally long, and is counted by one call."""
    metrics = Metrics()
    distribution = metrics.distribution("kvpair_itl_seconds", "Gaps.", buckets=(0.01, 0.1))
    distribution.observe(0.01, 3)
    distribution.observe(0.05)
    distribution.observe(7.0, 2)
    values = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.exposition())
        for sample in family.samples
    }
    assert values == {
        ("kvpair_itl_seconds_bucket", "0.01"): 3,
        ("kvpair_itl_seconds_bucket", "0.1"): 4,
        ("kvpair_itl_seconds_bucket", "+Inf"): 6,
        ("kvpair_itl_seconds_count", None): 6,
        ("kvpair_itl_seconds_sum", None): pytest.approx(14.08),
    }


def test_gauges_of_one_label_are_read_together() -> None:
    """States that must add up come from one look, however many there are."""
    metrics, looks = Metrics(), []

    def read() -> dict[str, float]:
        looks.append(1)
        return {"free": 3, "active": 4}

    metrics.gauges_from("kvpair_pool_blocks", "Blocks.", "state", read)
    text = metrics.exposition()
    assert 'kvpair_pool_blocks{state="free"} 3.0' in text
    assert 'kvpair_pool_blocks{state="active"} 4.0' in text
    assert len(looks) == 1, "declaring reads nothing, and asking reads once"


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_daemons_series_carry_its_name(accept: str) -> None:
    """So those of both daemons can lie side by side, whoever scraped them under whatever job."""
    metrics = Metrics("decoded")
    metrics.counter("kvpair_requests_total", "Requests.", ["outcome"]).labels("ok").inc()
    metrics.distribution("kvpair_itl_seconds", "Gaps.").observe(0.5)
    body, content_type = metrics.encoded(accept)
    parse = openmetrics if accept else text_string_to_metric_families
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    assert {sample.labels["daemon"] for sample in samples} == {"decoded"}
    assert {sample.name for sample in samples} >= {
        "kvpair_requests_total", "kvpair_itl_seconds_bucket", "process_resident_memory_bytes"
    }  # fmt: skip
    assert content_type.startswith("application/openmetrics" if accept else "text/plain")
    assert set(metrics.snapshot()) == {'kvpair_requests_total{outcome="ok"}'}


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
