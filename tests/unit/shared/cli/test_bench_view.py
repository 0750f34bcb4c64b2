"""`shared.cli.bench_view`: what people and programs are told of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from protocol.messages import DeviceTimings, HandoffTimings
from shared.cli.bench_figures import Spread, figures_of
from shared.cli.bench_plan import Load, Slo, Span
from shared.cli.bench_view import Told, as_json, doubts, heading, table
from tests.support.heard import failed, heard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.cli.bench_stream import Heard

README = (Path(__file__).parents[4] / "shared" / "README.md").read_text()
LOAD = Load(
    num_requests=4,
    concurrency=2,
    rate=None,
    prompt_tokens=Span(low=10, high=10),
    answer_tokens=Span(low=1, high=3),
    num_shared_tokens=0,
    seed=0,
)
STATISTICS = ("mean", "std", "median", "p90", "p99", "max")


def told(all_heard: Sequence[Heard], *, slo: Slo | None = None) -> Told:
    slo = slo or Slo()
    return Told(
        date="2026-01-02T03:04:05+00:00",
        pair={
            "model": "m", "version": "1", "fingerprint": "f", "access": "direct",
            "prefilld_device": "cpu", "decoded_device": "cpu",
        },
        load=LOAD,
        num_warmup=2,
        time_limit_s=60.0,
        slo=slo,
        figures=figures_of(all_heard, slo),
        failures=[each.failure for each in all_heard if each.failure is not None],
        stopped_by=None,
        num_processes=1,
        client_busy=0.1,
    )  # fmt: skip


TWO = told([heard([100, 110, 130]), heard([100, 120, 150])])

LONG = told([heard([100, 1200])])


def test_every_field_has_its_meaning_in_the_readme() -> None:
    """A program's author reads that and nothing else."""
    chapter = README.partition("## What `kvpair bench` measures")[2].partition("\n## ")[0]
    for field in as_json(TWO):
        wait = re.fullmatch(rf"(?:{'|'.join(STATISTICS)})_(\w+)_ms", field)
        assert f"`{wait.group(1) if wait else field}`" in chapter


def test_each_wait_has_each_statistic() -> None:
    body = as_json(TWO)
    spread = TWO.figures.gap
    assert isinstance(spread, Spread)
    for name in STATISTICS:
        assert body[f"{name}_gap_ms"] == getattr(spread, name)


def test_what_was_not_seen_is_null_and_a_dash() -> None:
    """Zero would be a measurement."""
    nothing = told([])
    body = as_json(nothing)
    assert body["mean_ttft_ms"] is None
    assert body["request_throughput"] is None
    assert body["slo_attainment"] is None
    assert body["stages_ms"] == body["device_ms"] == {}
    assert "0 answered, 0 failed, 0 cut" in heading(nothing)[2]
    assert "- tokens" in heading(nothing)[3]
    assert drawn(nothing, has_rate=False)["time to first token"] == ["-"] * 5


def drawn(run: Told, *, has_rate: bool) -> dict[str, list[str]]:
    """Return the table's rows by their labels."""
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(run.figures, has_rate=has_rate))
    rows = [re.split(r"\s{2,}", line.strip()) for line in capture.get().splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_the_table_is_in_milliseconds_with_the_digits_that_tell() -> None:
    run = told([heard([1000, 1004.25]), heard([3000, 3004.25])])
    rows = drawn(run, has_rate=False)
    assert rows["ms"] == ["mean", "p50", "p90", "p99", "max"]
    assert rows["time to first token"][0] == "2,000.0"
    assert rows["first token to second"] == ["4.25"] * 5
    assert "sent late" not in rows
    assert "sent late" in drawn(run, has_rate=True)


def test_stages_are_told_in_groups() -> None:
    stages = HandoffTimings(ready=0.1, adopted=0.3, copy_start=0.0, copy_done=0.5, first_step=4.0)
    device = DeviceTimings(prefill=7.0, last_pull=0.25)
    run = told([heard([100, 110], handoff=stages, device=device)])
    rows = drawn(run, has_rate=False)
    assert rows["queue"] == ["1.00"] * 5
    assert rows["hand-over: first step"] == ["4.00"] * 5
    assert rows["on GPUs: prefill"] == ["7.00"] * 5
    assert rows["on GPUs: last pull"] == ["0.25"] * 5
    body = as_json(run)
    assert body["device_ms"]["last_pull"]["median"] == 0.25


def test_the_heading_says_what_was_asked() -> None:
    lines = heading(TWO)
    assert lines[0] == "model m, version 1, access direct, prefilld on cpu, decoded on cpu"
    assert lines[1] == "4 requests, at most 2 at a time; prompts of 10 tokens, answers of 1 to 3"
    rated = replace(TWO, load=replace(LOAD, rate=2.5, num_shared_tokens=4))
    assert heading(rated)[1].startswith(
        "4 requests, 2.5 a second, at most 2 at a time; prompts of 10 tokens, 4 of them shared"
    )


def test_what_was_cached_is_told() -> None:
    """Prompts are new, so this is either what was asked for or a doubt."""
    run = told([heard([100, 110], cached_tokens=8)])
    assert heading(run)[4] == "in the prefix cache: 8 of 10 prompt tokens"
    assert not any("cache" in line for line in heading(TWO))


def test_goodput_names_its_limits() -> None:
    run = told([heard([100, 110]), heard([100, 160])], slo=Slo(ttft_ms=200, itl_ms=20.5))
    assert heading(run)[4].startswith(
        "within 200 ms to the first token and 20.5 ms between any two tokens: 1 of 2 answers, "
    )
    assert as_json(run)["slo_attainment"] == 0.5


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (TWO, []),
        (
            replace(TWO, stopped_by="time-limit"),
            ["stopped after 60 s: 0 answers cut, 2 requests not sent"],
        ),
        (
            replace(TWO, stopped_by="interrupt"),
            ["interrupted: 0 answers cut, 2 requests not sent"],
        ),
        (replace(TWO, client_busy=0.93), []),
        (replace(LONG, client_busy=0.93), ["a client process was busy for 93% of the time"]),
        (
            told([failed("busy"), heard([1, 2]), failed("busy")]),
            ["2 requests failed with busy: it is busy"],
        ),
    ],
)
def test_doubts_are_told_where_there_are_some(run: Told, said: list[str]) -> None:
    found = doubts(run)
    assert len(found) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(found, said, strict=True))
