"""Sampling in one launch on a GPU against the reference, and inside a graph."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from shared.ops.batch_sampling import SamplingTensors
from shared.ops.triton.sampling import sample_batch
from tests.gpu.ops.sampling_checks import PARAMS, check_sampling, check_ties

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [97, 49_152, 128_256])
def test_the_same_tokens_are_chosen_as_by_the_reference(vocab_size: int) -> None:
    """Greedy, hot, top-k, top-p, min-p and all of them, at many positions."""
    check_sampling("cuda", vocab_size=vocab_size, num_positions=20)


def test_what_ties_is_kept_or_decided_by_the_lowest_id() -> None:
    """Edges are values, not places in a sorted list."""
    check_ties("cuda")


def test_a_captured_graph_follows_the_parameters() -> None:
    """Requests come and go while the graph stays."""
    held = SamplingTensors.of(PARAMS, [0] * len(PARAMS), "cuda")
    logits = torch.randn(len(PARAMS), 49_152, device="cuda")
    sample_batch(logits, held)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample_batch(logits, held)
    for position, rotated in enumerate((PARAMS, PARAMS[3:] + PARAMS[:3])):
        how = SamplingTensors.of(rotated, [position] * len(rotated), "cuda")
        for field in fields(how):
            if isinstance(new := getattr(how, field.name), torch.Tensor):
                getattr(held, field.name).copy_(new)
        graph.replay()
        assert torch.equal(chosen, sample_batch(logits, how))
