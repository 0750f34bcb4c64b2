"""The README's table and plot of the pair on GPUs, from the last results.

    python -m tests.benchmarks.gpu_table [FILE]

prints both, of the committed results or of a file; a test holds the README to the former.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "h200x2.json"

BAR_WIDTH = 56
PLOT_MS = 56.0
"""What the whole width stands for: the longest bar."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    figures: tuple[str, ...]
    goal: str
    peer: str
    """vLLM 0.23.0 on the same machine: tuned prefill-decode on two GPUs, and where it is told apart
    behind a semicolon the same on one GPU, where there is no hand-over."""
    limit: str


ROWS = (
    Row(
        "hand-over cost after 512 / 4,000 / 16,000 / 64,000 tokens, ms",
        ("handover_ms_512", "handover_ms_4000", "handover_ms_16000", "handover_ms_64000"),
        "0.6 / 0.9 / 1.1 / -",
        "18 / 24 / 51 / -; none on one GPU",
        "0.2 / 0.6 / 0.6 / -",
    ),
    Row(
        "the same on one GPU, direct, ms",
        (
            "direct_handover_ms_512",
            "direct_handover_ms_4000",
            "direct_handover_ms_16000",
            "direct_handover_ms_64000",
        ),
        "0.5 whatever the length",
        "-",
        "socket",
    ),
    Row(
        "first token to second at the client, ms",
        ("gap_ms_512", "gap_ms_4000", "gap_ms_16000"),
        "4.8 / 5.1 / 5.7",
        "22 / 28.5 / 56; 4.0 / 4.9 / 5.1 on one GPU",
        "3.7 / 4.2 / 4.6",
    ),
    Row(
        "hand-over of a 70B-shaped cache, 4,000 tokens: all pulls / what is not hidden, ms",
        ("handover_70b_4000_total_ms", "handover_70b_4000_exposed_ms"),
        "- / 1",
        "-",
        "3.3 / 0.63",
    ),
    Row(
        "pull over NVLink, GB/s: alone / beside decoding",
        ("pull_gb_s", "pull_gb_s_beside_decode"),
        "355 / 150",
        "-",
        "392",
    ),
    Row("a step beside a pull, % longer while it lasts", ("step_slowdown_pct",), "12", "-", "0"),
    Row("time per token, batch 1 after 4,000, ms", ("tpot_ms_bs1_4000",), "4.2", "4.82", "3.6"),
    Row(
        "between tokens, batch 16 / 64, ms",
        ("itl_ms_bs16", "itl_ms_bs64"),
        "4.9 / 6.6",
        "5.41 / 7.34",
        "4.1 / 5.7",
    ),
    Row(
        "time to the first token, 512 / 4,000 / 16,000, ms",
        ("ttft_ms_512", "ttft_ms_4000", "ttft_ms_16000"),
        "13.5 / 95 / 452",
        "22 / 100 / 472",
        "9.1 / 76 / 368",
    ),
    Row(
        "between tokens while prompts arrive, p99 ÷ p50: two GPUs / one GPU",
        ("itl_p99_over_p50", "itl_p99_over_p50_one_gpu"),
        "1.15 / 2.5",
        "10.2 / 8.7",
        "1",
    ),
    Row(
        "on one GPU: between tokens while prompts arrive, p99, ms",
        ("one_gpu_itl_p99_ms",),
        "13",
        "50.8",
        "-",
    ),
    Row(
        "HANDOFF to ADOPT, µs: idle p50 / batch 64 p99",
        ("handoff_adopt_us_p50", "handoff_adopt_us_p99_bs64"),
        "100 / 2,000",
        "-",
        "15",
    ),
    Row("KV slots reserved and unused, %", ("kv_waste_pct",), "4", "60-80", "0.6"),
)

BARS = (
    ("vLLM, two GPUs, 512 tokens", 22.0),
    ("kvpair", "gap_ms_512"),
    ("vLLM, two GPUs, 4,000", 28.5),
    ("kvpair", "gap_ms_4000"),
    ("vLLM, two GPUs, 16,000", 56.0),
    ("kvpair", "gap_ms_16000"),
)


def table(figures: dict[str, float]) -> str:
    """Return the table as Markdown."""
    lines = ["| | measured | goal | peer | limit |", "|---|---|---|---|---|"]
    for row in ROWS:
        measured = " / ".join(
            _rounded(figures[name]) if name in figures else "?" for name in row.figures
        )
        lines.append(f"| {row.what} | **{measured}** | {row.goal} | {row.peer} | {row.limit} |")
    return "\n".join(lines)


def plot(figures: dict[str, float]) -> str:
    """Return bars of the gap between the first token and the second."""
    lines = []
    for label, value in BARS:
        value_ms = figures[value] if isinstance(value, str) else value
        bar = "█" * max(1, round(value_ms / PLOT_MS * BAR_WIDTH))
        lines.append(f"{label:>27} {bar} {value_ms:.1f} ms")
    return "\n".join(lines)


def last_figures(path: Path = RESULTS) -> dict[str, float]:
    """Return the figures of the last run that was written there."""
    figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return figures


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    """Print both."""
    figures = last_figures(*map(Path, sys.argv[1:2]))
    print(table(figures))
    print()
    print(plot(figures))


if __name__ == "__main__":
    main()
