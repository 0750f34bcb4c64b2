"""`shared.cli.top_view`: a screen that is readable at 80 columns and 24 rows."""

from __future__ import annotations

from typing import Any

import pytest

from shared.cli.top_readings import History, Reading, Samples
from shared.cli.top_view import STATES, Screen, bar, seconds, sparkline
from shared.metrics import Metrics

POOL = {
    "total": 1024, "reserved": 1, "free": 700, "cached": 100, "active": 200, "leased": 20,
    "quarantined": 3, "block_size": 16, "block_bytes": 737_280,
}  # fmt: skip
LINK = {"state": "open", "access": "pull", "rtt_us": 52.5, "bandwidth_gb_s": 8.125}


def requests(num: int) -> dict[str, Any]:
    rows = [
        {"id": f"r{n}" + "x" * 60, "state": "running", "tokens": 100 * n, "of": 1000, "age_s": n}
        for n in range(num)
    ]
    return {"total": num, "first": rows}


def history(**status: Any) -> History:  # noqa: ANN401 - whatever STATUS tells
    made = History()
    for at_s in range(30):
        metrics = Metrics("x")
        for name in ("requests_accepted", "prompt_tokens", "generated_tokens"):
            metrics.counter(f"kvpair_{name}_total", "Counted.").inc(at_s * at_s * 100)
        for name in ("ttft", "second_token", "itl"):
            metrics.distribution(f"kvpair_{name}_seconds", "Waits.").observe(0.02, at_s)
        metrics.counter("kvpair_requests_failed_total", "F.", ["code"]).labels("busy").inc(2)
        metrics.gauges_from("kvpair_queue_requests", "Q.", "queue", lambda: {"waiting": 3})
        metrics.gauges_from("kvpair_queue_oldest_seconds", "Q.", "queue", lambda: {"waiting": 4.5})
        told = {"state": "serving", "pool": POOL, "link": LINK} | status
        text = metrics.exposition()
        made.add(Reading(at_s=at_s, status=told, samples=Samples.parse(text)))
    return made


def away(fault: str = "no socket at /run/kvpair/prefilld.sock") -> History:
    made = History()
    made.add(Reading(at_s=0, fault=fault))
    return made


def draw(
    prefilld: History, decoded: History, width: int = 80, height: int = 24, *, is_live: bool = True
) -> list[str]:
    screen = Screen(prefilld=prefilld, decoded=decoded, clock="12:00:00", is_live=is_live)
    return screen.draw(width, height).plain.split("\n")


def test_everything_fits_the_smallest_usual_terminal() -> None:
    rows = draw(history(requests=requests(3)), history(requests=requests(40)))
    assert len(rows) <= 24
    assert max(map(len, rows)) <= 80
    text = "\n".join(rows)
    for word in (
        "prefilld serving", "decoded serving", "12:00:00", "link          open", "52.5 µs",
        "8.12 GB/s", "requests", "prompt tokens", "cached tokens", "new tokens",
        "first token", "token gap",
        "! quarantined", "! 3", "· 700", "waiting 3 (4.5 s)", "busy 2", "requests: 43", "more",
        "100 of 1,000 answer",
    ):  # fmt: skip
        assert word in text, word


def test_a_larger_terminal_shows_more_requests_and_longer_sparklines() -> None:
    small = draw(history(), history(requests=requests(40)))
    large = draw(history(), history(requests=requests(40)), width=140, height=50)
    assert sum(" running " in row for row in large) > sum(" running " in row for row in small)
    spark = next(row for row in large if row.startswith("new tokens"))
    assert spark.rstrip()[-29:] == spark.rstrip()[-29:].strip()
    assert max(map(len, large)) <= 140


@pytest.mark.parametrize(("width", "height"), [(80, 10), (80, 1), (30, 24), (10, 3), (1, 1)])
def test_a_tiny_terminal_cuts_and_does_not_fail(width: int, height: int) -> None:
    rows = draw(history(requests=requests(2)), history(), width, height)
    assert len(rows) <= height


def test_a_daemon_that_is_away_says_why_and_hides_nothing_of_the_other() -> None:
    rows = draw(away(), history(requests=requests(1)))
    text = "\n".join(rows)
    assert "prefilld away" in rows[0]
    assert "prefilld: no socket at /run/kvpair/prefilld.sock" in text
    assert "decoded serving" in rows[0]
    assert "requests: 1" in text
    assert draw(away(), away())


def test_a_loading_daemon_has_nothing_to_tell_yet() -> None:
    loading = history(state="loading", pool=None, link=None, requests=None)
    text = "\n".join(draw(loading, loading))
    assert "prefilld loading" in text
    assert "link          unknown" in text


def test_what_a_daemon_said_cannot_move_the_cursor() -> None:
    hostile = {"total": 1, "first": [{"id": "\x1b[2J", "state": "\n", "tokens": 1, "of": 0}]}
    text = "\n".join(draw(away("\x1b[31m"), history(requests=hostile)))
    assert "\x1b" not in text


def test_keys_are_told_of_where_somebody_reads_them() -> None:
    """`--once` prints and ends; there is nothing to quit."""
    assert draw(history(), history())[0].endswith("12:00:00  q quits")
    assert draw(history(), history(), is_live=False)[0].endswith("12:00:00")


def test_a_paused_screen_says_so() -> None:
    screen = Screen(prefilld=history(), decoded=history(), clock="1", is_paused=True)
    assert "paused" in screen.draw(80, 24).plain.split("\n")[0]


@pytest.mark.parametrize(
    ("values", "columns", "drawn"),
    [
        ([0, 1, 2, 4], 4, "▁▃▅█"),
        ([9, 0, 1, 2, 4], 4, "▁▃▅█"),
        ([0, 0], 4, "▁▁"),
        ([], 4, ""),
        ([1], 0, ""),
        ([-1, 1], 4, "▁█"),
    ],
)
def test_a_sparkline_is_scaled_to_its_highest(
    values: list[float], columns: int, drawn: str
) -> None:
    assert sparkline(values, columns) == drawn


def test_a_bar_is_as_long_as_it_was_asked_to_be_and_shows_the_smallest_part() -> None:
    """Three blocks in quarantine are what somebody looks for."""
    counts = {state: int(str(POOL[state])) for state, _, _ in STATES}
    drawn = bar(counts, 40).plain
    assert len(drawn) == 40
    assert drawn.count("!") == 1
    assert drawn.count("·") > drawn.count("█") > drawn.count("▒") > 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0000525, "52.5 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119.0, "119 s"),
        (125.0, "2 min 5 s"),
        (7260.0, "2 h 1 min"),
    ],
)
def test_durations_are_told_in_their_unit(value: float | None, shown: str) -> None:
    assert seconds(value) == shown
