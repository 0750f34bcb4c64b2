"""`shared.cli.log_lines`: lines read, ordered, chosen and shown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cli.log_lines import (
    LogLine,
    Reorderer,
    Timeline,
    Wanted,
    as_json,
    in_order,
    parse_line,
)

NOON_US = round(datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp() * 1e6)


def line(event: str = "request.accepted", *, after_us: int = 0, **fields: Any) -> LogLine:  # noqa: ANN401 - whatever is logged
    moment = datetime.fromtimestamp((NOON_US + after_us) / 1e6, UTC)
    known = {"timestamp": moment.isoformat(), "level": "info", "daemon": "prefilld"}
    text = json.dumps({**known, "event": event, **fields})
    return parse_line(text, source="x", time_us=0)


def test_a_daemons_line_says_itself_who_wrote_it_and_when() -> None:
    parsed = line(after_us=7, monotonic_ns=5)
    assert (parsed.source, parsed.time_us, parsed.monotonic_ns) == ("prefilld", NOON_US + 7, 5)


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):",
        "{broken",
        '{"no": "event"}',
        '{"event": 5}',
        "[1, 2]",
        "",
        '{"a":' * 5000,
    ],
)
def test_anything_else_is_plain_text(text: str) -> None:
    """A manager's word and a dying interpreter's are lines as well."""
    parsed = parse_line(text, source="decoded", time_us=9)
    assert (parsed.fields, parsed.source, parsed.time_us) == (None, "decoded", 9)
    assert json.loads(as_json(parsed))["message"] == text


@pytest.mark.parametrize("timestamp", ["never", None, 5, "9999-99-99"])
def test_a_line_with_a_broken_time_keeps_its_place(timestamp: object) -> None:
    text = json.dumps({"event": "x.y", "timestamp": timestamp})
    assert parse_line(text, source="x", time_us=11).time_us == 11


@given(times=st.lists(st.integers(0, 50), max_size=60), window=st.integers(1, 8))
def test_lines_that_are_nearly_in_order_come_out_in_order(times: list[int], window: int) -> None:
    """Whatever is at most a window too late finds its place, and nothing is lost."""
    late = sorted(range(len(times)), key=lambda index: index + times[index] % window)
    lines = [LogLine(text=str(place), time_us=place) for place in late]
    reorderer = Reorderer(max_lines=window)
    came = [out for each in lines for out in reorderer.push(each)]
    came += reorderer.rest()
    assert [out.time_us for out in came] == list(range(len(times)))


def test_lines_of_one_moment_keep_their_order() -> None:
    lines = [LogLine(text=str(number), time_us=5) for number in range(20)]
    assert [out.text for out in in_order(lines)] == [str(number) for number in range(20)]


def test_a_followed_line_is_held_for_those_that_belong_before_it() -> None:
    """Two daemons' writers are a few milliseconds apart."""
    reorderer = Reorderer()
    for text, time_us, arrived_s in (("b", 20, 1.0), ("a", 10, 1.1), ("c", 30, 2.0)):
        assert list(reorderer.push(LogLine(text=text, time_us=time_us), arrived_s)) == []
    assert [out.text for out in reorderer.held_before(1.5)] == ["a", "b"]
    assert list(reorderer.held_before(1.5)) == []
    assert [out.text for out in reorderer.rest()] == ["c"]


@pytest.mark.parametrize(
    ("wanted", "admits"),
    [
        (Wanted(), True),
        (Wanted(request_id="r1"), True),
        (Wanted(request_id="r"), False),
        (Wanted(since_us=NOON_US), True),
        (Wanted(since_us=NOON_US + 1), False),
        (Wanted(level="info"), True),
        (Wanted(level="warning"), False),
    ],
)
def test_lines_are_chosen_by_request_time_and_level(wanted: Wanted, admits: bool) -> None:
    assert wanted.admits(line(request_id="r1")) is admits


def test_plain_text_belongs_to_no_request() -> None:
    text = parse_line("Started prefilld.", source="systemd", time_us=NOON_US)
    assert Wanted().admits(text)
    assert not Wanted(request_id="r1").admits(text)


def test_a_critical_line_passes_every_level() -> None:
    assert Wanted(level="error").admits(line(level="critical"))
    assert Wanted(level="error").admits(line(level="of its own"))


def test_one_requests_times_begin_with_its_first_line() -> None:
    timeline = Timeline(is_one_request=True)
    first = timeline.show(line(request_id="r1", prompt_tokens=5))
    second = timeline.show(line("handoff.sent", after_us=1_234, request_id="r1", lease_id=None))
    assert first.split() == ["+0.000", "ms", "prefilld", "request.accepted", "prompt_tokens=5"]
    assert second.split() == ["+1.234", "ms", "prefilld", "handoff.sent"]


def test_a_warning_says_so_and_a_traceback_stands_below_its_line() -> None:
    shown = Timeline().show(line("daemon.failed", level="error", exception="Trace\n  boom"))
    head, *rows = shown.splitlines()
    assert head.split()[3:] == ["prefilld", "error", "daemon.failed"]
    assert rows == ["    Trace", "      boom"]


def test_values_are_bare_where_that_is_plain() -> None:
    shown = Timeline().show(line(a="x", b="two words", c="", d=[1, 2], e={"k": None}, f=True))
    assert 'a=x b="two words" c="" d=[1, 2] e={"k": null} f=true' in shown


def test_a_line_cannot_move_the_terminals_cursor() -> None:
    """What a library or a peer said may be in it."""
    hostile = {"reason": "\x1b[2J\x07\r\nfaked line", "\x1bk": 1, "bare": "\x1b[2J"}
    shown = Timeline(color=True).show(line("x.y", **hostile))
    assert "\x1b[2J" not in shown
    assert "\x1bk" not in shown
    assert "\\u001b[2J\\u0007\\r\\nfaked line" in shown
    assert "\\x1b[2J" in shown
    assert "\n" not in shown


def test_colours_are_there_only_when_asked_for() -> None:
    assert "\x1b[" in Timeline(color=True).show(line(level="error"))
    assert "\x1b" not in Timeline().show(line(level="error"))
