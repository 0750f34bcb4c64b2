"""`kvpair logs`: what both daemons logged, as one timeline."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shared.cli.log_lines import LEVELS, Timeline, Wanted, as_json
from shared.cli.parameters import FILE_NAME, TEXT
from shared.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shared.cli.log_lines import LogLine
    from shared.cli.log_sources import Source

REQUEST_HELP = "Only what concerns this request."

NOTHING_IN_FILES = "no line was logged that fits"
NOTHING_IN_JOURNAL = (
    "the journal has no line that fits; what `kvpair up` runs logs to its stderr: name that file, "
    "`kvpair logs FILE`"
)

FOLLOWED_LINES = 10
"""How many lines `--follow` begins with, as `journalctl` and `tail` do."""

MAX_LINES = 10_000_000
"""Most that `--lines` keeps in memory."""

US_PER_S = 1_000_000

_UNITS_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"-?(\d+)\s*(s|min|m|h|d)(?:\s+ago)?")


@click.command
@click.argument("files", nargs=-1, metavar="[FILE]...", type=FILE_NAME)
@click.option("-f", "--follow", is_flag=True, help="Wait for more.")
@click.option("--request", "request_id", type=TEXT, metavar="ID", help=REQUEST_HELP)
@click.option("--since", metavar="WHEN", help='Not before: "10min", "2h", "14:30", or a date.')
@click.option("--level", type=click.Choice(LEVELS[:4]), default="debug", help="The lowest to show.")
@click.option(
    "-n", "--lines", "num_lines", type=click.IntRange(0, MAX_LINES), help="Only the last so many."
)
@click.option("--json", "as_json_", is_flag=True, help="Print the lines as they were logged.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="auto: on a terminal.",
)
def logs(
    files: tuple[str, ...],
    *,
    follow: bool,
    request_id: str | None,
    since: str | None,
    level: str,
    num_lines: int | None,
    as_json_: bool,
    color: str,
) -> None:
    """Show what both daemons logged, as one timeline.

    Read from the journal, where the pair runs as a service; else from each FILE, or from stdin
    where it is "-":

        kvpair up 2>&1 | kvpair logs -f -

    With --request, times are told from the request's first line on.
    """
    now = datetime.now().astimezone()
    since_us = None if since is None else round(parse_since(since, now).timestamp() * US_PER_S)
    wanted = Wanted(request_id=request_id, since_us=since_us, level=level)
    timeline = Timeline(is_one_request=request_id is not None, color=_wants_color(color))
    show: Callable[[LogLine], str] = as_json if as_json_ else timeline.show
    is_narrowed = request_id is not None or since is not None or level != "debug"
    if num_lines is None and follow and not is_narrowed:
        num_lines = FOLLOWED_LINES
    from shared.cli.log_sources import Sources  # noqa: PLC0415  not for `--help`

    num_shown = 0

    def show_all(lines: Iterable[LogLine]) -> None:
        nonlocal num_shown
        for line in lines:
            click.echo(show(line), color=timeline.color)
            num_shown += 1

    opened = _open(files, follow=follow, since_us=since_us, num_lines=num_lines)
    with Sources(opened, follow=follow) as sources:
        backlog: Iterable[LogLine] = filter(wanted.admits, sources.backlog())
        show_all(backlog if num_lines is None else deque(backlog, maxlen=num_lines))
        if follow:
            show_all(filter(wanted.admits, sources.live()))
    if not num_shown:
        click.echo(f"kvpair: {NOTHING_IN_FILES if files else NOTHING_IN_JOURNAL}", err=True)


def parse_since(text: str, now: datetime) -> datetime:
    """Read a moment: so long ago, a time of today, a date, or both.

    Raises:
        UsageError: It is none of those.
    """
    if match := _AGO.fullmatch(text.strip()):
        number, unit = match.groups()
        try:
            return now - timedelta(seconds=int(number) * _UNITS_S[unit])
        except (OverflowError, ValueError) as error:  # digits without end are a ValueError
            raise UsageError(f"--since {text}: no calendar goes back so far") from error
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if text == "today":
        return midnight
    if text == "yesterday":
        return midnight - timedelta(days=1)
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            hour, _, rest = text.partition(":")
            text = f"{now:%Y-%m-%d}T{hour:0>2}:{rest}"
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"--since {text}: expected 10min, 2h, 3d, 14:30, or a date as 2026-01-31"
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)


def _open(
    files: tuple[str, ...], *, follow: bool, since_us: int | None, num_lines: int | None
) -> list[Source]:
    """Open what was named; the journal where nothing was."""
    from shared.cli.log_sources import (  # noqa: PLC0415  as above
        FileSource,
        JournalSource,
        PipeSource,
    )

    if not files:
        # How many are shown is our own to count where not all are: the journal knows no requests.
        num_asked = num_lines if follow else None
        return [JournalSource(follow=follow, since_us=since_us, num_lines=num_asked)]
    return [
        PipeSource(sys.stdin.buffer, "stdin")
        if name == "-"
        else FileSource(Path(name), follow=follow)
        for name in files
    ]


def _wants_color(color: str) -> bool:
    if color == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return color == "always"
