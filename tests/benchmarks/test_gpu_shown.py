"""What the command makes of its figures; what they are, only GPUs show."""

from __future__ import annotations

from tests.benchmarks.gpu_shown import PHASES
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
