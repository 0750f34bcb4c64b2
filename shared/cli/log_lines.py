"""Log lines as `kvpair logs` has them: read from JSON, put in order, shown to people.  Pure.

A daemon's line is one JSON object; a service manager's word about it, or a traceback of an
interpreter that died, is plain text among them, and is shown as such.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import click

US_PER_S = 1_000_000

MAX_OUT_OF_ORDER_LINES = 4096
"""Lines that are held back until those before them are known: two daemons' queues are written a
few milliseconds apart, and a queue is that long."""

LEVELS = ("debug", "info", "warning", "error", "critical")

_COLORS = {"prefilld": "cyan", "decoded": "magenta"}
_LEVEL_COLORS = {"debug": "bright_black", "warning": "yellow", "error": "red", "critical": "red"}
_SHOWN_APART = frozenset({"timestamp", "level", "daemon", "event", "monotonic_ns", "exception"})

TEXT_EVENT = "text.logged"
"""What `--json` calls a line that is no JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line."""

    text: str
    """As it was written, without its end."""
    time_us: int
    """Wall-clock time, since 1970."""
    monotonic_ns: int = 0
    """Orders lines of one microsecond."""
    source: str = ""
    """Who wrote it: a daemon's name, or a file's."""
    fields: dict[str, Any] | None = None
    """None where it is plain text."""

    @property
    def level(self) -> str:
        """Return its level; plain text is as loud as information."""
        return "info" if self.fields is None else str(self.fields.get("level", "info"))


def parse_line(text: str, *, source: str, time_us: int) -> LogLine:
    """Read one line.

    Args:
        text: Without its end.
        source: Who wrote it, where the line does not say so itself.
        time_us: When, where the line does not say so itself.
    """
    fields = _json_object(text)
    if fields is None or not isinstance(fields.get("event"), str):
        return LogLine(text=text, time_us=time_us, source=source)
    monotonic_ns = fields.get("monotonic_ns")
    return LogLine(
        text=text,
        time_us=_time_us(fields.get("timestamp"), default=time_us),
        monotonic_ns=monotonic_ns if isinstance(monotonic_ns, int) else 0,
        source=str(fields.get("daemon", source)),
        fields=fields,
    )


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _time_us(timestamp: object, *, default: int) -> int:
    try:
        moment = datetime.fromisoformat(str(timestamp))
        return round(moment.timestamp() * US_PER_S)
    except (ValueError, OverflowError):
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines are shown."""

    request_id: str | None = None
    since_us: int | None = None
    level: str = "debug"

    def admits(self, line: LogLine) -> bool:
        """Return whether a line is among them."""
        if self.since_us is not None and line.time_us < self.since_us:
            return False
        if self.request_id not in (None, (line.fields or {}).get("request_id")):
            return False
        rank = LEVELS.index(line.level) if line.level in LEVELS else len(LEVELS)
        return rank >= LEVELS.index(self.level)


class Reorderer:
    """Puts lines in order that are nearly so.

    A line is given out once so many came behind it that none before it can still come, or, where
    lines are followed, once it has been held for long enough.
    """

    def __init__(self, max_lines: int = MAX_OUT_OF_ORDER_LINES) -> None:
        self._max_lines = max_lines
        self._heap: list[tuple[int, int, int, float, LogLine]] = []
        self._num_pushed = 0

    def push(self, line: LogLine, now_s: float = 0.0) -> Iterator[LogLine]:
        """Take a line, and yield those that are due."""
        self._num_pushed += 1
        # The number keeps lines of one time in their order, and lines themselves uncompared.
        key = (line.time_us, line.monotonic_ns, self._num_pushed)
        heapq.heappush(self._heap, (*key, now_s, line))
        while len(self._heap) > self._max_lines:
            yield heapq.heappop(self._heap)[-1]

    def held_before(self, arrived_s: float) -> Iterator[LogLine]:
        """Yield what arrived before a time, and all that belongs before it."""
        due = [index for index, entry in enumerate(self._heap) if entry[3] < arrived_s]
        if not due:
            return
        last = max(self._heap[index][:3] for index in due)
        while self._heap and self._heap[0][:3] <= last:
            yield heapq.heappop(self._heap)[-1]

    def rest(self) -> Iterator[LogLine]:
        """Yield everything that is left."""
        while self._heap:
            yield heapq.heappop(self._heap)[-1]


def in_order(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield lines in the order of their time."""
    reorderer = Reorderer()
    for line in lines:
        yield from reorderer.push(line)
    yield from reorderer.rest()


def as_json(line: LogLine) -> str:
    """Return a line as one JSON object: as it is, or plain text wrapped."""
    if line.fields is not None:
        return line.text
    moment = datetime.fromtimestamp(line.time_us / US_PER_S).astimezone()
    wrapped = {
        "timestamp": moment.isoformat(timespec="microseconds"),
        "level": "info",
        "daemon": line.source,
        "event": TEXT_EVENT,
        "message": line.text,
    }
    return json.dumps(wrapped, ensure_ascii=False)


@dataclass(slots=True)
class Timeline:
    """Shows lines to people: one a line, tracebacks below theirs.

    Args:
        is_one_request: Times are told from the first line on, and the id is left out.
        color: Whether to colour them.
    """

    is_one_request: bool = False
    color: bool = False
    _began_us: int | None = field(default=None, init=False)

    def show(self, line: LogLine) -> str:
        """Return what is printed for a line."""
        if self._began_us is None:
            self._began_us = line.time_us
        head = f"{self._when(line.time_us)}  {self._styled(f'{line.source:<8}', line.source)}"
        if line.fields is None:
            return f"{head}  {printable(line.text)}"
        event = printable(str(line.fields["event"]))
        shown = [head, self._level(line.level), self._bold(f"{event:<20}")]
        shown += [
            f"{self._dim(printable(str(key)) + '=')}{printable(_value(value))}"
            for key, value in line.fields.items()
            if key not in _SHOWN_APART
            and value is not None
            and not (self.is_one_request and key == "request_id")
        ]
        text = "  ".join(part for part in shown[:3] if part) + "  " + " ".join(shown[3:])
        if exception := line.fields.get("exception"):
            rows = str(exception).splitlines()
            text = "\n".join([text.rstrip(), *(f"    {printable(row)}" for row in rows)])
        return text.rstrip()

    def _when(self, time_us: int) -> str:
        if self.is_one_request and self._began_us is not None:
            return f"{(time_us - self._began_us) / 1000:>+11,.3f} ms"
        moment = datetime.fromtimestamp(time_us / US_PER_S).astimezone()
        return moment.strftime("%b %d %H:%M:%S.") + f"{moment.microsecond // 1000:03}"

    def _level(self, level: str) -> str:
        if level == "info":
            return ""
        text = printable(level)
        return click.style(text, fg=_LEVEL_COLORS.get(level)) if self.color else text

    def _styled(self, text: str, source: str) -> str:
        text = printable(text)
        return click.style(text, fg=_COLORS.get(source, "blue")) if self.color else text

    def _bold(self, text: str) -> str:
        return click.style(text, bold=True) if self.color else text

    def _dim(self, text: str) -> str:
        return click.style(text, dim=True) if self.color else text


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor, or worse: a line may hold anybody's words."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _value(value: object) -> str:
    """Return a value as people read it: text bare where that is plain, the rest as JSON."""
    if isinstance(value, str):
        return (
            value
            if value and not any(c in value for c in ' "=')
            else json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value, ensure_ascii=False)
