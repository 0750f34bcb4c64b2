"""Sampling without the host against the CPU's."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.sampling_tensors import SamplingTensors
from shared.ops.triton.sampling import sample
from tests.gpu.ops.sampling_checks import check_sampling, check_ties


@pytest.mark.parametrize("vocab_size", [97, 5_000])
def test_the_same_tokens_are_chosen_as_on_the_cpu(vocab_size: int) -> None:
    """Greedy, hot, top-k, top-p and all of them, at many positions; in one tile and in two."""
    check_sampling("cpu", vocab_size=vocab_size, num_positions=6)


def test_what_ties_is_kept_or_decided_by_the_lowest_id() -> None:
    """Edges are values, not places in a sorted list."""
    check_ties("cpu")


def test_what_does_not_fit_is_refused() -> None:
    """A kernel would read beside its tensors and say nothing."""
    params = SamplingTensors.greedy(2, "cpu")
    with pytest.raises(ShapeError, match=r"must be torch\.float32 of 3 rows"):
        sample(torch.zeros(3, 8), params)
    with pytest.raises(ShapeError, match="logits must be float32"):
        sample(torch.zeros(2, 8, dtype=torch.float64), params)
    with pytest.raises(ShapeError, match="must be contiguous"):
        sample(torch.zeros(8, 2).t(), params)
