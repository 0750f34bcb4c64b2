"""A run of `kvpair bench` as people and programs read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

from shared.cli.bench_figures import Figures, Spread
from shared.cli.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from shared.cli.bench_plan import Load, Slo
    from shared.cli.bench_stream import Failure

_ROWS = {
    "ttft": "time to first token",
    "gap": "first token to second",
    "handover": "  of that the hand-over",
    "itl": "between tokens",
    "itl_beside_prompts": "  while a prompt is computed",
    "itl_alone": "  while none is",
    "tpot": "time per token after the first",
    "e2el": "whole answer",
    "send_lag": "sent late",
}
"""Rows of the table, by the field of `Figures`."""

_ONLY_WITH_RATE = frozenset({"send_lag"})

_BEFORE = ("queue", "prefill")
"""Stages that end where the hand-over begins."""

_STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99", "max": "max"}
"""Columns of the table, by the field of `Spread`."""

StoppedBy = Literal["time-limit", "interrupt"]

BUSY_CLIENT = 0.7
BUSY_AFTER_S = 1.0
"""Share of its time that a client process may compute before its figures are doubted, in a run of
some length: in a short one it has mostly begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All that a run's report tells of."""

    date: str
    """When it began, UTC."""
    pair: Mapping[str, object]
    """What was measured, as the daemons tell it."""
    load: Load
    num_warmup: int
    time_limit_s: float
    slo: Slo
    figures: Figures
    failures: Sequence[Failure]
    """One for each request that failed."""
    stopped_by: StoppedBy | None
    """Why not all was asked; None where it was."""
    num_processes: int
    client_busy: float
    """Share of the time that the busiest client process computed."""


# --- for programs ----------------------------------------------------------------------------


def as_json(told: Told) -> dict[str, object]:
    """Return a run as one object; `shared/README.md` lists its fields."""
    load, figures, slo = told.load, told.figures, told.slo
    num_over = figures.num_completed + figures.num_failed
    good = figures.num_good
    body: dict[str, object] = {
        "date": told.date,
        "stopped_by": told.stopped_by,
        "pair": dict(told.pair),
        "num_prompts": load.num_requests,
        "request_rate": "inf" if load.rate is None else load.rate,
        "max_concurrency": load.concurrency,
        "prompt_tokens": [load.prompt_tokens.low, load.prompt_tokens.high],
        "answer_tokens": [load.answer_tokens.low, load.answer_tokens.high],
        "shared_prefix_tokens": load.num_shared_tokens,
        "seed": load.seed,
        "num_warmups": told.num_warmup,
        "time_limit_s": told.time_limit_s,
        "ttft_slo_ms": slo.ttft_ms,
        "itl_slo_ms": slo.itl_ms,
        "num_client_processes": told.num_processes,
        "client_busy": round(told.client_busy, 3),
        "duration": round(figures.duration_s, 6),
        "completed": figures.num_completed,
        "failed": figures.num_failed,
        "cut": figures.num_cut,
        "failures": figures.failures,
        "resumptions": figures.num_resumptions,
        "total_input_tokens": figures.input_tokens,
        "total_cached_tokens": figures.cached_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.a_second(figures.num_completed),
        "output_throughput": figures.a_second(figures.output_tokens),
        "total_token_throughput": figures.a_second(figures.input_tokens + figures.output_tokens),
        "request_goodput": None if good is None else figures.a_second(good),
        "slo_attainment": None if good is None or not num_over else good / num_over,
        "max_concurrent_requests": figures.max_concurrent_requests,
    }
    for name in _ROWS:
        spread: Spread | None = getattr(figures, name)
        for statistic in fields(Spread):
            if statistic.name != "num":
                value = None if spread is None else getattr(spread, statistic.name)
                body[f"{statistic.name}_{name}_ms"] = value
    return body | {"stages_ms": _plain(figures.stages), "device_ms": _plain(figures.device)}


def _plain(spreads: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    return {name: asdict(spread) for name, spread in spreads.items()}


# --- for people ------------------------------------------------------------------------------


def heading(told: Told) -> list[str]:
    """Return lines that say what was measured and how much came of it."""
    load, figures = told.load, told.figures
    pace = [f"{load.rate:g} a second"] if load.rate is not None else []
    pace += [f"at most {load.concurrency} at a time"] if load.concurrency is not None else []
    shared = f", {load.num_shared_tokens:,} of them shared" if load.num_shared_tokens else ""
    lines = [
        ", ".join(f"{key} {value}" for key, value in _brief(told.pair).items()),
        f"{counted(load.num_requests, 'request')}, {', '.join(pace)}; prompts of "
        f"{load.prompt_tokens} tokens{shared}, answers of {load.answer_tokens}",
        f"{figures.num_completed:,} answered, {figures.num_failed:,} failed, "
        f"{figures.num_cut:,} cut in {figures.duration_s:.1f} s; at most "
        f"{figures.max_concurrent_requests} ran at once",
    ]
    rates = [
        _rate(figures, figures.num_completed, "answers"),
        _rate(figures, figures.output_tokens, "tokens"),
        _rate(figures, figures.input_tokens, "prompt tokens"),
    ]
    lines.append(f"a second: {', '.join(rates)}")
    if figures.cached_tokens:
        lines.append(
            f"in the prefix cache: {figures.cached_tokens:,} of {figures.input_tokens:,} prompt "
            "tokens"
        )
    if figures.num_good is not None:
        num_over = figures.num_completed + figures.num_failed
        lines.append(
            f"within {_limits(told.slo)}: {figures.num_good:,} of {num_over:,} answers, "
            f"{_rate(figures, figures.num_good, 'a second')}"
        )
    return lines


def table(figures: Figures, *, has_rate: bool) -> Table:
    """Return the waits as a table, in ms."""
    from rich import box  # noqa: PLC0415  for people only: it costs as much as all the rest
    from rich.table import Table  # noqa: PLC0415

    made = Table("ms", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _STATISTICS.values():
        made.add_column(column, justify="right")
    for name, label in _ROWS.items():
        if has_rate or name not in _ONLY_WITH_RATE:
            made.add_row(label, *_cells(getattr(figures, name)))
    for group in (_stage_rows(figures), _device_rows(figures)):
        if group:
            made.add_section()
        for label, spread in group.items():
            made.add_row(label, *_cells(spread))
    return made


def _stage_rows(figures: Figures) -> dict[str, Spread]:
    return {
        name if name in _BEFORE else f"hand-over: {_words(name)}": spread
        for name, spread in figures.stages.items()
    }


def _device_rows(figures: Figures) -> dict[str, Spread]:
    return {f"on GPUs: {_words(name)}": spread for name, spread in figures.device.items()}


def _words(name: str) -> str:
    return name.replace("_", " ")


def doubts(told: Told) -> list[str]:
    """Return what a reader must know before the figures are believed."""
    found = []
    if told.stopped_by == "time-limit":
        found.append(
            f"stopped after {told.time_limit_s:g} s: {_left_out(told)}; the figures are of what "
            "came until then (--time-limit)"
        )
    if told.stopped_by == "interrupt":
        found.append(f"interrupted: {_left_out(told)}; the figures are of what came until then")
    if told.client_busy > BUSY_CLIENT and told.figures.duration_s > BUSY_AFTER_S:
        found.append(
            f"a client process was busy for {told.client_busy:.0%} of the time: some of the waits "
            "may be its own"
        )
    if told.figures.num_resumptions:
        found.append(
            f"answers broke off and were resumed {counted(told.figures.num_resumptions, 'time')}; "
            "`kvpair logs` says why"
        )
    firsts: dict[str, Failure] = {}
    for failure in told.failures:
        firsts.setdefault(failure.code, failure)
    found += [
        f"{counted(told.figures.failures[code], 'request')} failed with {first}"
        for code, first in firsts.items()
    ]
    return found


def _left_out(told: Told) -> str:
    figures = told.figures
    num_unsent = (
        told.load.num_requests - figures.num_completed - figures.num_failed - figures.num_cut
    )
    return f"{counted(figures.num_cut, 'answer')} cut, {counted(num_unsent, 'request')} not sent"


def _brief(pair: Mapping[str, object]) -> dict[str, object]:
    shown = ("model", "version", "access", "prefilld_device", "decoded_device")
    return {name.replace("_device", " on"): pair[name] for name in shown}


def _rate(figures: Figures, number: int, noun: str) -> str:
    rate = figures.a_second(number)
    if rate is None:
        return f"- {noun}"
    return f"{rate:,.0f} {noun}" if rate >= 100 else f"{rate:.3g} {noun}"


def _limits(slo: Slo) -> str:
    limits = [] if slo.ttft_ms is None else [f"{slo.ttft_ms:g} ms to the first token"]
    limits += [] if slo.itl_ms is None else [f"{slo.itl_ms:g} ms between any two tokens"]
    return " and ".join(limits)


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * len(_STATISTICS)
    return [_ms(getattr(spread, name)) for name in _STATISTICS]


def _ms(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"
