"""`shared.cli.top_readings`: rates and quantiles from two daemons' readings."""

from __future__ import annotations

import pytest

from shared.cli.top_readings import MAX_READINGS, WINDOW_S, History, Reading, Samples
from shared.metrics import Metrics


def samples(tokens: float, waits: dict[float, int] | None = None) -> Samples:
    """Return a scrape with one counter, and a histogram of waits."""
    metrics = Metrics("decoded")
    metrics.counter("kvpair_tokens_total", "Tokens.", ["kind"]).labels("new").inc(tokens)
    distribution = metrics.distribution("kvpair_wait_seconds", "Waits.", buckets=(1, 2, 4))
    for value, count in (waits or {}).items():
        distribution.observe(value, count)
    return Samples.parse(metrics.exposition())


def history(*readings: Reading) -> History:
    made = History()
    for reading in readings:
        made.add(reading)
    return made


def test_a_scrape_is_read_by_name_and_label() -> None:
    read = samples(3, {1.5: 2})
    assert read.total("kvpair_tokens_total") == 3
    assert read.by("kvpair_tokens_total", "kind") == {"new": 3}
    assert read.buckets("kvpair_wait_seconds") == {1: 0, 2: 2, 4: 2, float("inf"): 2}
    assert read.total("kvpair_unknown") == 0


def test_a_rate_is_told_over_the_window_and_shown_from_reading_to_reading() -> None:
    made = history(
        Reading(at_s=0, samples=samples(0)),
        Reading(at_s=2, samples=samples(20)),
        Reading(at_s=4, samples=samples(80)),
    )
    assert made.rate("kvpair_tokens_total") == 20
    assert made.rates("kvpair_tokens_total") == [10, 30]


def test_what_is_older_than_the_window_does_not_count() -> None:
    made = history(
        Reading(at_s=0, samples=samples(1000)),
        Reading(at_s=WINDOW_S, samples=samples(1100)),
        Reading(at_s=2 * WINDOW_S, samples=samples(1200)),
    )
    assert made.rate("kvpair_tokens_total") == 100 / WINDOW_S


def test_one_reading_is_no_rate() -> None:
    assert history().rate("kvpair_tokens_total") is None
    assert history(Reading(at_s=1, samples=samples(5))).rate("kvpair_tokens_total") is None


def test_a_restarted_daemon_counts_from_zero() -> None:
    """A rate below zero would be nonsense, and the old count has nothing to do with it."""
    made = history(
        Reading(at_s=0, samples=samples(1000, {1.5: 50})),
        Reading(at_s=1, samples=samples(10, {0.5: 10})),
    )
    assert made.rate("kvpair_tokens_total") == 10
    assert made.quantile("kvpair_wait_seconds", 0.5) == 0.5


def test_a_daemon_that_was_away_leaves_a_gap_and_no_lie() -> None:
    away = Reading(at_s=1, fault="no socket")
    made = history(Reading(at_s=0, samples=samples(10)), away, Reading(at_s=2, samples=samples(30)))
    assert made.rates("kvpair_tokens_total") == [0, 0]
    assert made.rate("kvpair_tokens_total") == 10
    assert history(Reading(at_s=0, samples=samples(9)), away).rate("kvpair_tokens_total") is None


@pytest.mark.parametrize(
    ("waits", "share", "value"),
    [
        ({1.5: 10}, 0.5, 1.5),
        ({0.5: 50, 3.0: 50}, 0.5, 1.0),
        ({0.5: 50, 3.0: 50}, 0.99, 3.96),
        ({9.0: 5}, 0.5, 4.0),
        ({}, 0.5, None),
    ],
)
def test_a_quantile_is_of_what_came_meanwhile(
    waits: dict[float, int], share: float, value: float | None
) -> None:
    """What was counted before the first reading does not weigh in."""
    before = {0.5: 1000}
    after = before | {wait: count + before.get(wait, 0) for wait, count in waits.items()}
    made = history(
        Reading(at_s=0, samples=samples(0, before)), Reading(at_s=1, samples=samples(0, after))
    )
    assert made.quantile("kvpair_wait_seconds", share) == (
        None if value is None else pytest.approx(value)
    )
    assert made.quantiles("kvpair_wait_seconds", share) == [pytest.approx(value or 0)]


def test_a_view_that_is_left_open_keeps_a_bounded_past() -> None:
    made = history(*(Reading(at_s=at_s, samples=samples(at_s)) for at_s in range(MAX_READINGS + 9)))
    assert len(made.rates("kvpair_tokens_total")) == MAX_READINGS - 1
    assert made.last.at_s == MAX_READINGS + 8
