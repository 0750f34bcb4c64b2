"""`kvpair logs`, as a person runs it: over files, stdin and the journal."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

from shared.cli.logs import parse_since
from shared.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Kvpair

NOW = datetime(2026, 11, 29, 12, 30, tzinfo=timezone(timedelta(hours=2)))


def entry(second: int, daemon: str, event: str, **fields: Any) -> str:  # noqa: ANN401 - whatever is logged
    return json.dumps(
        {
            "timestamp": f"2026-11-29T12:00:{second:02}.000000Z",
            "level": "info",
            "daemon": daemon,
            "event": event,
            **fields,
        }
    )


@pytest.fixture
def log_files(tmp_path: Path) -> list[str]:
    """Both daemons' logs of two requests, and what is no daemon's line."""
    prefilld = [
        entry(1, "prefilld", "request.accepted", request_id="r1"),
        entry(3, "prefilld", "handoff.sent", request_id="r1"),
        entry(4, "prefilld", "request.accepted", request_id="r2"),
        "a traceback's last words",
    ]
    decoded = [
        entry(2, "decoded", "link.opened"),
        entry(5, "decoded", "request.ended", request_id="r1", level="warning"),
    ]
    for name, lines in (("prefilld", prefilld), ("decoded", decoded)):
        (tmp_path / f"{name}.log").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / f"{name}.log") for name in ("prefilld", "decoded")]


def events(output: str) -> list[str]:
    """Return each shown line's event, or the text that stands in its place."""
    return [line.split("  ")[2].strip() for line in output.splitlines()]


def test_both_daemons_lines_are_one_timeline(kvpair: Kvpair, log_files: list[str]) -> None:
    code, output, errors = kvpair("logs", *log_files, TZ="UTC")
    assert (code, errors) == (0, "")
    assert events(output) == [
        "request.accepted", "link.opened", "handoff.sent", "request.accepted",
        "a traceback's last words", "warning",
    ]  # fmt: skip
    assert output.startswith("Nov 29 12:00:01.000  prefilld  request.accepted      request_id=r1")


def test_one_requests_lines_are_found_in_both(kvpair: Kvpair, log_files: list[str]) -> None:
    code, output, _ = kvpair("logs", "--request", "r1", *log_files)
    assert code == 0
    times_ms = [line.split()[0] for line in output.splitlines()]
    assert times_ms == ["+0.000", "+2,000.000", "+4,000.000"]
    assert "r1" not in output


def test_json_passes_lines_through_as_they_were_written(
    kvpair: Kvpair, log_files: list[str]
) -> None:
    """Each line is one object, also what was none."""
    _, output, _ = kvpair("logs", "--json", "--level", "info", *log_files)
    lines = output.splitlines()
    assert lines[0] == entry(1, "prefilld", "request.accepted", request_id="r1")
    assert [json.loads(line)["event"] for line in lines].count("text.logged") == 1


@pytest.mark.parametrize(
    ("options", "num_lines"),
    [
        (["--level", "warning"], 1),
        (["--since", "2026-11-29T12:00:04Z"], 3),
        (["-n", "2"], 2),
        (["-n", "0"], 0),
        (["--request", "unknown"], 0),
    ],
)
def test_lines_are_narrowed_down(
    kvpair: Kvpair, log_files: list[str], options: list[str], num_lines: int
) -> None:
    code, output, errors = kvpair("logs", *options, *log_files)
    assert (code, len(output.splitlines())) == (0, num_lines)
    assert ("no line was logged that fits" in errors) == (num_lines == 0)


def test_stdin_is_read_to_its_end(kvpair: Kvpair) -> None:
    text = entry(2, "decoded", "b.b") + "\n" + entry(1, "prefilld", "a.a")  # its last line is open
    code, output, _ = kvpair("logs", "-", text=text)
    assert (code, events(output)) == (0, ["a.a", "b.b"])


def test_followed_stdin_is_shown_before_it_ends(kvpair: Kvpair) -> None:
    """`kvpair up 2>&1 | kvpair logs -f -`."""
    with kvpair.start("logs", "-f", "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(entry(1, "prefilld", "daemon.started") + "\n")
        process.stdin.flush()
        assert "daemon.started" in process.stdout.readline()
        process.stdin.write(entry(2, "prefilld", "daemon.stopped") + "\n")
        process.stdin.close()
        assert "daemon.stopped" in process.stdout.readline()
        assert process.wait(30) == 0


def test_a_followed_file_may_grow_and_be_replaced(kvpair: Kvpair, tmp_path: Path) -> None:
    """What a log rotation does."""
    path = tmp_path / "prefilld.log"
    path.write_text(entry(1, "prefilld", "first.line") + "\n")
    with kvpair.start("logs", "--follow", str(path)) as process:
        assert process.stdout is not None
        assert "first.line" in process.stdout.readline()
        with path.open("a") as log:
            log.write(entry(2, "prefilld", "second.line") + "\n")
        assert "second.line" in process.stdout.readline()
        path.rename(tmp_path / "prefilld.log.1")
        path.write_text(entry(3, "prefilld", "third.line") + "\n")
        assert "third.line" in process.stdout.readline()
        os.truncate(path, 0)
        with path.open("a") as log:
            log.write(entry(4, "prefilld", "4.x") + "\n")
        assert "4.x" in process.stdout.readline()
        process.terminate()


def test_following_begins_with_the_last_ten_lines(kvpair: Kvpair, tmp_path: Path) -> None:
    path = tmp_path / "prefilld.log"
    lines = [entry(second, "prefilld", f"x.n{second}") for second in range(30)]
    path.write_text("\n".join([*lines, ""]))
    with kvpair.start("logs", "-f", str(path)) as process:
        assert process.stdout is not None
        assert "x.n20" in process.stdout.readline()
        process.terminate()


def test_a_file_that_cannot_be_read_is_named(kvpair: Kvpair, tmp_path: Path) -> None:
    code, output, errors = kvpair("logs", str(tmp_path / "none.log"))
    assert (code, output) == (2, "")
    assert errors == f"kvpair: cannot read {tmp_path}/none.log: No such file or directory\n"


JOURNALCTL = """#!/bin/sh
printf '%s\\n' "$*" > "$(dirname "$0")/arguments"
cat "$(dirname "$0")/entries"
exit $(cat "$(dirname "$0")/status")
"""
"""In the place of the system's: the journal itself cannot be written to by a test."""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A folder for PATH whose `journalctl` prints `entries`."""
    program = tmp_path / "journalctl"
    program.write_text(JOURNALCTL)
    program.chmod(0o755)
    (tmp_path / "status").write_text("0")
    entries = [
        {
            "MESSAGE": entry(2, "decoded", "request.ended", request_id="r1"),
            "_SYSTEMD_UNIT": "decoded.service",
            "__REALTIME_TIMESTAMP": "1795953602000100",
        },
        {
            "MESSAGE": "prefilld.service: Main process exited, code=killed",
            "_SYSTEMD_UNIT": "init.scope",
            "UNIT": "prefilld.service",
            "__REALTIME_TIMESTAMP": "1795953601000000",
        },
        {"MESSAGE": [98, 255], "_SYSTEMD_UNIT": "prefilld.service"},
        {"MESSAGE": None},
    ]
    (tmp_path / "entries").write_text("\n".join([*map(json.dumps, entries), "odd", ""]))
    return tmp_path


def test_without_files_the_journal_is_read(kvpair: Kvpair, journal: Path) -> None:
    """Both units, with what the service manager says about them."""
    path = f"{journal}:{os.environ['PATH']}"
    code, output, errors = kvpair("logs", PATH=path, TZ="UTC")
    assert (code, errors) == (0, "")
    assert [line.split("  ", 1)[1].split()[0] for line in output.splitlines()] == [
        "prefilld", "systemd", "decoded"
    ]  # fmt: skip
    assert (journal / "arguments").read_text().split() == [
        "--output=json", "--no-pager", "--unit=prefilld.service", "--unit=decoded.service",
        "--lines=all",
    ]  # fmt: skip


def test_since_and_follow_are_the_journals_to_narrow(kvpair: Kvpair, journal: Path) -> None:
    path = f"{journal}:{os.environ['PATH']}"
    kvpair("logs", "-f", "-n", "5", "--since", "2026-11-29T12:00:00Z", PATH=path)
    assert (journal / "arguments").read_text().split()[4:] == [
        "--follow", "--since=@1795953600.000000", "--lines=5"
    ]  # fmt: skip


def test_a_journal_that_fails_is_told(kvpair: Kvpair, journal: Path) -> None:
    (journal / "status").write_text("4")
    code, _, errors = kvpair("logs", PATH=f"{journal}:{os.environ['PATH']}")
    assert (code, errors) == (1, "kvpair: journalctl ended with 4\n")


def test_an_empty_journal_says_where_else_lines_may_be(kvpair: Kvpair, journal: Path) -> None:
    """A pair that `kvpair up` runs leaves nothing in the journal."""
    (journal / "entries").write_text("")
    code, _, errors = kvpair("logs", PATH=f"{journal}:{os.environ['PATH']}")
    assert code == 0
    assert "`kvpair logs FILE`" in errors


def test_a_machine_without_a_journal_says_what_to_do(kvpair: Kvpair, tmp_path: Path) -> None:
    code, _, errors = kvpair("logs", PATH=str(tmp_path))
    assert code == 78
    assert "name the files that hold the daemons' logs" in errors


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10min", NOW - timedelta(minutes=10)),
        ("-2h", NOW - timedelta(hours=2)),
        ("3 d ago", NOW - timedelta(days=3)),
        ("90s", NOW - timedelta(seconds=90)),
        ("9:15", NOW.replace(hour=9, minute=15)),
        ("14:30:05", NOW.replace(hour=14, minute=30, second=5)),
        ("today", NOW.replace(hour=0, minute=0)),
        ("yesterday", NOW.replace(day=28, hour=0, minute=0)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=NOW.tzinfo)),
        ("2026-01-31 10:00+00:00", datetime.fromisoformat("2026-01-31T10:00+00:00")),
    ],
)
def test_since_is_read_as_people_write_it(text: str, moment: datetime) -> None:
    assert parse_since(text, NOW) == moment


@pytest.mark.parametrize("text", ["soon", "10 parsecs", "25:00", "2026-13-01", ""])
def test_a_since_that_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="expected 10min, 2h, 3d, 14:30"):
        parse_since(text, NOW)
