"""Sampling in one launch against the reference."""

from __future__ import annotations

import pytest
import torch

from shared.ops.batch_sampling import SamplingTensors
from shared.ops.errors import ShapeError
from shared.ops.sampling import SamplingParams
from shared.ops.triton.sampling import sample_batch
from tests.gpu.ops.sampling_checks import check_sampling, check_ties


@pytest.mark.parametrize("vocab_size", [97, 5_000])
def test_the_same_tokens_are_chosen_as_by_the_reference(vocab_size: int) -> None:
    """Greedy, hot, top-k, top-p, min-p and all of them, at many positions; in one tile and two."""
    check_sampling("cpu", vocab_size=vocab_size, num_positions=6)


def test_what_ties_is_kept_or_decided_by_the_lowest_id() -> None:
    """Edges are values, not places in a sorted list."""
    check_ties("cpu")


def test_what_does_not_fit_is_refused() -> None:
    """A kernel would read beside its tensors and say nothing."""
    how = SamplingTensors.of([SamplingParams()] * 2, [0, 0])
    with pytest.raises(ShapeError, match="3 rows and 2 parameters"):
        sample_batch(torch.zeros(3, 8), how)
    with pytest.raises(ShapeError, match=r"contiguous float32, not torch\.float64"):
        sample_batch(torch.zeros(2, 8, dtype=torch.float64), how)
    with pytest.raises(ShapeError, match="must be contiguous"):
        sample_batch(torch.zeros(8, 2).t(), how)
