"""The README shows the last results, with every figure that was asked for."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.gpu_table import RESULTS, last_figures, plot, table
from tests.support.questions import REPOSITORY

ASKED_FOR = (
    "handover_ms_512",
    "handover_ms_4000",
    "handover_ms_16000",
    "gap_ms_512",
    "gap_ms_4000",
    "gap_ms_16000",
    "handover_70b_4000_total_ms",
    "handover_70b_4000_exposed_ms",
    "direct_handover_ms_4000",
    "direct_handover_ms_64000",
    "pull_gb_s",
    "pull_gb_s_beside_decode",
    "step_slowdown_pct",
    "tpot_ms_bs1_4000",
    "itl_ms_bs16",
    "itl_ms_bs64",
    "ttft_ms_512",
    "ttft_ms_4000",
    "ttft_ms_16000",
    "itl_p99_over_p50",
    "itl_p99_over_p50_one_gpu",
    "handoff_adopt_us_p50",
    "handoff_adopt_us_p99_bs64",
    "kv_waste_pct",
    "one_gpu_itl_p99_ms",
)


def test_the_readme_shows_the_last_results() -> None:
    """Put what `python -m tests.benchmarks.gpu_table` prints into README.md when this fails."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert table(last_figures()) in readme
    assert plot(last_figures()) in readme


def test_the_results_say_where_they_come_from() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(document) == {"hardware", "commit", "date", "command", "figures"}
    assert all(isinstance(value, float) for value in document["figures"].values())


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_figure_was_measured(name: str) -> None:
    assert last_figures()[name] > 0
