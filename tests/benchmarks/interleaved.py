"""Times two ways of doing one thing by turns, so that a busy machine slows both alike.

On a shared machine a figure of its own means little; the ratio of two runs side by side does.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_PAIRS = 7
"""A median over fewer would follow a single disturbance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """Seconds of each run, pair by pair."""

    baseline_s: tuple[float, ...]
    candidate_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the candidate was, ascending."""
        pairs = zip(self.baseline_s, self.candidate_s, strict=True)
        return sorted(baseline / candidate for baseline, candidate in pairs)

    @property
    def median_ratio(self) -> float:
        """The middle of `ratios`."""
        return statistics.median(self.ratios)

    def describe(self, *, num_tokens: int) -> str:
        """Return one line: tokens a second of both, and the ratios."""
        rates = [
            num_tokens / statistics.median(times) for times in (self.baseline_s, self.candidate_s)
        ]
        low, high = self.ratios[0], self.ratios[-1]
        return (
            f"{rates[0]:.1f} against {rates[1]:.1f} tokens/s; ratio {self.median_ratio:.2f} "
            f"(median of {len(self.ratios)} pairs, {low:.2f} to {high:.2f})"
        )


def time_interleaved(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    num_pairs: int = MIN_PAIRS,
    clock_s: Callable[[], float] = time.perf_counter,
) -> Interleaved:
    """Run both once unmeasured, then by turns, each going first in every other pair."""
    baseline()
    candidate()
    baseline_s: list[float] = []
    candidate_s: list[float] = []
    turns = [(baseline, baseline_s), (candidate, candidate_s)]
    for _ in range(num_pairs):
        for run, times_s in turns:
            start_s = clock_s()
            run()
            times_s.append(clock_s() - start_s)
        turns.reverse()
    return Interleaved(baseline_s=tuple(baseline_s), candidate_s=tuple(candidate_s))
