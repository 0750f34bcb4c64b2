"""Breaks and restarts of a pair on the CPU; `tests.benchmarks.gpu_shown` has more of them on GPUs.

Nothing may be left of a link that is gone, on either side.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.steadiness import check_steadiness

pytestmark = pytest.mark.slow

MAX_RSS_GROWTH_MIB = 16.0
"""Caches and logs; a pool that stayed mapped would show in descriptors as well."""


def test_links_that_break_leave_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    """Each is a new connection, a new mapping and a new control page within one epoch."""
    figures = check_steadiness(
        tmp_path, model=tiny_model, devices=("cpu", "cpu"), num_cycles=20, num_restarts=1
    )
    print("".join(f"\n{name}: {value:.3g}" for name, value in figures.items()))
    for name in ("prefilld", "decoded"):
        assert figures[f"cycles_{name}_more_descriptors"] <= 0
        assert figures[f"cycles_{name}_more_threads"] <= 0
        assert figures[f"cycles_{name}_rss_growth_mib"] < MAX_RSS_GROWTH_MIB
