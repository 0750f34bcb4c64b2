"""How `kvpair top` looks: a screen of text from two daemons' readings.  Pure.

Made for 80 columns and 24 rows; a larger terminal shows longer sparklines and more requests.
States are told by characters as well as by colours, so a monochrome terminal loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.text import Text

from shared.cli.log_lines import printable
from shared.cli.top_readings import History

MIN_WIDTH = 40
"""Columns below which nothing would be readable; the screen is cut there."""

SPARKS = "▁▂▃▄▅▆▇█"

STATES: tuple[tuple[str, str, str], ...] = (
    ("active", "█", "green"),
    ("leased", "▓", "yellow"),
    ("cached", "▒", "blue"),
    ("quarantined", "!", "red"),
    ("reserved", "|", "bright_black"),
    ("free", "·", "bright_black"),
)
"""A block's states, in the order in which a bar shows them."""

LABEL_COLUMNS = 14
NUMBER_COLUMNS = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Everything that is shown at one moment."""

    prefilld: History
    decoded: History
    clock: str
    """The time of day, as it is shown."""
    is_paused: bool = False
    is_live: bool = True
    """Somebody's keys are read."""

    def draw(self, width: int, height: int) -> Text:
        """Return the screen, of at most `width` columns and `height` rows."""
        width = max(width, MIN_WIDTH)
        rows = [
            *self._head(width),
            *self._rates(width),
            *self._latencies(width),
            *self._pools(width),
            *self._queues(),
        ]
        rows += self._requests(width, max(0, height - len(rows)))
        for row in rows:
            row.truncate(width)
        return Text("\n").join(rows[:height])

    # --- who is there ------------------------------------------------------------------------

    def _head(self, width: int) -> list[Text]:
        row = Text("kvpair", style="bold")
        for name, history in (("prefilld", self.prefilld), ("decoded", self.decoded)):
            row.append("  ").append(name + " ").append(*_state(history))
        right = ("paused  " if self.is_paused else "") + self.clock
        right += "  q quits" if self.is_live else ""
        row.append(" " * max(2, width - len(row) - len(right))).append(right, "bright_black")
        faults = [  # whole, since the cure is at the end
            Text(line, style="red")
            for name, history in (("prefilld", self.prefilld), ("decoded", self.decoded))
            if history.last.fault is not None
            for line in wrap(f"{name}: {printable(history.last.fault)}", width)
        ]
        return [row, *faults, self._link()]

    def _link(self) -> Text:
        status = _map(self.prefilld.last.status.get("link"))
        state = str(status.get("state", "unknown"))
        row = Text(f"{'link':<{LABEL_COLUMNS}}")
        row.append(state, "green" if state == "open" else "red")
        if (access := status.get("access")) is not None:
            row.append(f"  {access}")
        if isinstance(rtt_us := status.get("rtt_us"), int | float):
            row.append(f"  round trip {seconds(rtt_us / 1e6)}")
        if isinstance(bandwidth := status.get("bandwidth_gb_s"), int | float):
            row.append(f"  mapped at {bandwidth:.3g} GB/s")
        lost = self.prefilld.last.samples.total("kvpair_links_lost_total")
        restarts = self.prefilld.last.samples.total("kvpair_peer_restarts_total")
        if lost or restarts:
            row.append(f"  lost {lost:g}, decoded restarted {restarts:g}", "yellow")
        return row

    # --- how fast ----------------------------------------------------------------------------

    def _rates(self, width: int) -> list[Text]:
        rows = [_heading("a second", width)]
        for label, history, name in (
            ("requests", self.prefilld, "kvpair_requests_accepted_total"),
            ("prompt tokens", self.prefilld, "kvpair_prompt_tokens_total"),
            ("cached tokens", self.prefilld, "kvpair_prefix_cache_hit_tokens_total"),
            ("new tokens", self.decoded, "kvpair_generated_tokens_total"),
        ):
            rate = history.rate(name)
            number = "-" if rate is None else f"{rate:,.1f}"
            rows.append(_measured(label, number, history.rates(name), width))
        return rows

    def _latencies(self, width: int) -> list[Text]:
        rows = [_heading("p50 / p99", width)]
        for label, history, name in (
            ("first token", self.prefilld, "kvpair_ttft_seconds"),
            ("second token", self.decoded, "kvpair_second_token_seconds"),
            ("token gap", self.decoded, "kvpair_itl_seconds"),
        ):
            p50, p99 = history.quantile(name, 0.5), history.quantile(name, 0.99)
            number = f"{seconds(p50)} / {seconds(p99)}"
            rows.append(_measured(label, number, history.quantiles(name, 0.5), width))
        return rows

    # --- who has what ------------------------------------------------------------------------

    def _pools(self, width: int) -> list[Text]:
        legend = "  ".join(f"{character} {state}" for state, character, _ in STATES)
        rows = [_heading(f"blocks: {legend}", width)]
        for name, history in (("prefilld", self.prefilld), ("decoded", self.decoded)):
            pool = _map(history.last.status.get("pool"))
            counts = {state: _count(pool.get(state)) for state, _, _ in STATES}
            row = Text(f"{name:<{LABEL_COLUMNS}}")
            total = sum(counts.values())
            if not total:
                rows.append(row.append("-"))
                continue
            numbers = Text()
            for state, character, color in STATES:
                if counts[state] and state != "reserved":
                    numbers.append(f"  {character}", color).append(f" {counts[state]:,}")
            columns = max(10, width - LABEL_COLUMNS - len(numbers))
            rows.append(row.append_text(bar(counts, columns)).append_text(numbers))
        return rows

    def _queues(self) -> list[Text]:
        row = Text(f"{'queues':<{LABEL_COLUMNS}}")
        for history, names in (
            (self.prefilld, ("waiting", "ready", "sent")),
            (self.decoded, ("pulling", "swapped", "unsent")),
        ):
            lengths = history.last.samples.by("kvpair_queue_requests", "queue")
            ages_s = history.last.samples.by("kvpair_queue_oldest_seconds", "queue")
            for name in names:
                length = lengths.get(name)
                row.append(f"{name} ").append(
                    "-" if length is None else f"{length:g}", "bold" if length else ""
                )
                if length and (age_s := ages_s.get(name)):
                    row.append(f" ({seconds(age_s)})", "yellow")
                row.append("  ")
        failed = Text(f"{'failed':<{LABEL_COLUMNS}}")
        for history in (self.prefilld, self.decoded):
            by_code = history.last.samples.by("kvpair_requests_failed_total", "code")
            for code, count in by_code.items():
                failed.append(f"{printable(code)} {count:g}  ", "yellow")
        dropped = sum(
            history.last.samples.total("kvpair_log_dropped_lines_total")
            for history in (self.prefilld, self.decoded)
        )
        if dropped:
            failed.append(f"log lines dropped {dropped:g}", "yellow")
        return [row, failed] if len(failed) > LABEL_COLUMNS else [row]

    def _requests(self, width: int, height: int) -> list[Text]:
        found: list[tuple[str, Mapping[str, Any]]] = []
        total = 0
        for name, history in (("decoded", self.decoded), ("prefilld", self.prefilld)):
            requests = _map(history.last.status.get("requests"))
            total += _count(requests.get("total"))
            rows = requests.get("first")
            if isinstance(rows, list):
                found += [(name, _map(each)) for each in rows]
        if height < 2:
            return []
        shown = found[: height - 1]
        more = f", {total - len(shown)} more" if total > len(shown) else ""
        heading = _heading(f"requests: {total}{more}", width)
        return [heading, *(_progress(name, request, width) for name, request in shown)]


def _state(history: History) -> tuple[str, str]:
    """Return a daemon's state and its colour."""
    if history.last.fault is not None:
        return "away", "red"
    state = printable(str(history.last.status.get("state", "unknown")))
    return state, "green" if state == "serving" else "yellow"


def _heading(text: str, width: int) -> Text:
    return Text(f"── {text} ".ljust(width, "─"), style="bright_black")


def _measured(label: str, number: str, values: Sequence[float], width: int) -> Text:
    row = Text(f"{label:<{LABEL_COLUMNS}}")
    row.append(f"{number:<{NUMBER_COLUMNS}}", "bold")
    return row.append(sparkline(values, width - LABEL_COLUMNS - NUMBER_COLUMNS), "cyan")


def _progress(daemon: str, request: Mapping[str, Any], width: int) -> Text:
    """Return one request's row: who it is, where, how far, how old."""
    tokens, of = _count(request.get("tokens")), _count(request.get("of"))
    age = request.get("age_s")
    unit = "prompt" if daemon == "prefilld" else "answer"
    row = Text(f"{printable(str(request.get('id', '-')))[:18]:<19}")
    row.append(f"{printable(str(request.get('state', '-')))[:8]:<9}")
    figures = f" {tokens:,} of {of:,} {unit}"
    aged = f"{seconds(age) if isinstance(age, int | float) else '-':>8}"
    columns = max(8, min(40, width - len(row) - 26 - len(aged)))
    done = round(columns * min(1.0, tokens / of)) if of else 0
    row.append("█" * done, "green").append("·" * (columns - done), "bright_black")
    return row.append(f"{figures:<26}").append(aged, "bright_black")


def sparkline(values: Sequence[float], columns: int) -> str:
    """Return the last values as a row of bars, scaled to the highest of them."""
    shown = values[-columns:] if columns > 0 else []
    highest = max(shown, default=0.0)
    if highest <= 0:
        return SPARKS[0] * len(shown)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(max(0.0, value) / highest * top)] for value in shown)


def bar(counts: Mapping[str, int], columns: int) -> Text:
    """Return blocks by state as a bar; what is there at all has a column at least."""
    total = sum(counts.values())
    widths = {
        state: max(1, round(counts[state] / total * columns)) if counts[state] else 0
        for state, _, _ in STATES
    }
    # Rounding up is paid for by the widest.
    widest = max(widths, key=lambda state: widths[state])
    widths[widest] = max(1, widths[widest] + columns - sum(widths.values()))
    row = Text()
    for state, character, color in STATES:
        row.append(character * widths[state], color)
    return row


def seconds(value: float | None) -> str:
    """Return a duration in the unit in which people say it."""
    if value is None:
        return "-"
    for limit, factor, unit in ((0.001, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
