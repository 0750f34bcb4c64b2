"""`kvpair status`: what both daemons say about themselves, side by side."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from shared.cli.pair import decoded_socket
from shared.cli.parameters import FILE_NAME
from shared.cli.words import PIPE_COLUMNS
from shared.config.paths import client_socket
from shared.errors import ExitCode

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers STATUS from its event loop, whatever its engine does."""

_HIDDEN = frozenset({"counters", "decoded_socket", "requests"})
"""For programs: --json has them; `kvpair top` shows requests."""


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def status(*, as_json: bool, socket: str | None) -> ExitCode:
    """Show what both daemons are doing.

    Where one of them does not answer, the other is shown, and the exit code is 69.
    """
    prefilld_socket = client_socket(os.environ, chosen=socket)
    prefilld = _ask("prefilld", prefilld_socket)
    decoded = _ask("decoded", decoded_socket(prefilld_socket, prefilld))
    answers = {"prefilld": prefilld, "decoded": decoded}
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    elif any(answer is not None for answer in answers.values()):
        _print_table({name: answer or {} for name, answer in answers.items()})
    return ExitCode.NO_DAEMON if None in answers.values() else ExitCode.OK


def _ask(name: str, socket: Path) -> dict[str, object] | None:
    """Return a daemon's status, or None where it does not answer; stderr is told why."""
    try:
        return Client(socket, timeout_s=ANSWER_TIMEOUT_S).status()
    except (ProtocolError, RequestError) as error:
        click.echo(f"kvpair: {name}: {error}", err=True)
        return None


def _print_table(answers: dict[str, dict[str, object]]) -> None:
    from rich import box  # noqa: PLC0415  for people only: it costs as much as all the rest
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    columns = [flatten(answer) for answer in answers.values()]
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in answers:
        table.add_column(name, overflow="fold")
    for key in _together([key for column in columns for key in column]):
        table.add_row(key, *(column.get(key, "-") for column in columns))
    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:  # whoever reads lines wants each row on one
        console.width = PIPE_COLUMNS
    console.print(table)


def _together(keys: list[str]) -> list[str]:
    """Return every key once, rows of one part beside each other even where one daemon has more."""
    parts = list(dict.fromkeys(key.partition(" ")[0] for key in keys))
    return sorted(dict.fromkeys(keys), key=lambda key: parts.index(key.partition(" ")[0]))


def flatten(answer: dict[str, object]) -> dict[str, str]:
    """Return a status as rows: nested keys joined by a space, values as people read them.

    The pool's rows end with whether its blocks add up: each is in exactly one state.
    """
    rows: dict[str, str] = {}
    for key, value in answer.items():
        if key in _HIDDEN:
            continue
        if isinstance(value, dict):
            rows |= {f"{key} {inner}": _show(inner, item) for inner, item in value.items()}
            if key == "pool" and (verdict := _adds_up(value)) is not None:
                rows["pool adds up"] = verdict
        else:
            rows[key] = _show(key, value)
    return rows


def _adds_up(pool: dict[str, object]) -> str | None:
    """Say whether the counts of blocks by state make the total; None where one is missing."""
    states = ("reserved", "free", "cached", "active", "leased", "quarantined")
    counts = [pool.get(state) for state in ("total", *states)]
    numbers = [count for count in counts if isinstance(count, int)]
    if len(numbers) < len(counts):
        return None
    total, *parts = numbers
    return "yes" if sum(parts) == total else f"no: {sum(parts)} of {total}"


def _show(key: str, value: object) -> str:
    """Return a value in the unit that its key names."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() if key.endswith("_bytes"):
            return f"{value:,} B"
        case int() if key not in {"pid", "peer_pid"}:
            return f"{value:,}"
        case float() if key.endswith("_s") and not key.endswith("_gb_s") and value >= 1:
            return _duration(value)
        case float():
            return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case _:
            return str(value)


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    parts = ((days, "d"), (hours_left, "h"), (minutes_left, "min"), (seconds_left, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number)
