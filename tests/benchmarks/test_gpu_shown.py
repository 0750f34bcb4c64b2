"""What the command makes of its figures; what they are, only GPUs show."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.gpu_shown import PHASES, write_results
from tests.benchmarks.shown_bounds import BOUNDS, missed


def test_every_phase_says_what_it_must_keep_to() -> None:
    assert set(BOUNDS) == set(PHASES)


def test_what_is_out_of_bounds_or_not_there_is_told() -> None:
    """A phase that failed must not pass for one that found nothing."""
    kept = {name: bound.high for name, bound in BOUNDS["smollm2"].items()}
    assert missed(kept, ["smollm2", "large"]) == []
    assert missed({}, ["smollm2"]) == [f"{name} was not measured" for name in BOUNDS["smollm2"]]
    (line,) = missed(kept | {"smollm2_bf16_flips": 0.5}, ["smollm2"])
    assert line == "smollm2_bf16_flips is 0.5, and not 0 to 0.05"


def test_phases_that_are_run_one_by_one_gather_in_one_file(tmp_path: Path) -> None:
    """One that is run again replaces its own figures."""
    path = tmp_path / "shown.json"
    for figures in ({"a": 1.0, "b": 2.0}, {"b": 3.0}):
        write_results(figures, path, "abc")
    document = json.loads(path.read_text())
    assert document["figures"] == {"a": 1.0, "b": 3.0}
    assert document["commit"] == "abc"
    assert document["command"].startswith("python -m tests.benchmarks.gpu_shown")
