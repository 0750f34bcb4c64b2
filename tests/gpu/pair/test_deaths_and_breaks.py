"""Daemons that are killed under load and links that break, on GPUs, within the bounds they have.

`make show-gpu` has more rounds of it, and writes down what was measured.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.gpu_shown import Sizes, deaths, steadiness
from tests.benchmarks.shown_bounds import missed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FEW = Sizes(num_cycles=20, num_restarts=2)
"""Two restarts: what is taken after the second is held against the first."""


def test_a_killed_daemon_takes_nothing_and_nobody_with_it() -> None:
    """The other goes on and lets go of its memory; a successor of the same size serves."""
    figures = deaths(FEW)
    print("".join(f"\n{name}: {value:.4g}" for name, value in figures.items()))
    assert missed(figures, ["deaths"]) == []


def test_broken_links_and_restarts_leave_nothing_behind() -> None:
    """Neither on a GPU nor in a daemon."""
    figures = steadiness(FEW)
    print("".join(f"\n{name}: {value:.4g}" for name, value in figures.items()))
    assert missed(figures, ["steadiness"]) == []
