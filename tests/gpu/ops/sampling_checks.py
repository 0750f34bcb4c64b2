"""What sampling in one launch must show, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch

from shared.ops.batch_sampling import SamplingTensors
from shared.ops.batch_sampling import sample_batch as sample_reference
from shared.ops.sampling import SamplingParams, candidates
from shared.ops.triton.sampling import sample_batch

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=(1 << 64) - 3),
    SamplingParams(temperature=0.7, top_k=5, seed=1),
    SamplingParams(temperature=1.5, top_p=0.9, seed=2),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.5, seed=1 << 40),
    SamplingParams(temperature=1e-4, seed=3),
    SamplingParams(temperature=1.0, top_k=1, seed=4),
    SamplingParams(temperature=3.0, top_k=1 << 40, top_p=0.999, seed=5),
    SamplingParams(temperature=2.0, top_p=1e-6, seed=6),
    SamplingParams(temperature=1.0, min_p=0.3, seed=7),
    SamplingParams(temperature=1.2, top_k=60, top_p=0.8, min_p=0.01, seed=8),
)

MAX_SHARE_OTHER = 0.01
"""Noise and edges are computed with another logarithm and other sums: where two tokens come within
some 1e-6 of each other, another one may win."""


def check_sampling(device: str, *, vocab_size: int, num_positions: int) -> None:
    """Every kind of parameters, at every position, chooses what the reference chooses."""
    generator = torch.Generator().manual_seed(vocab_size)
    num_other = 0
    for position in range(num_positions):
        logits = 4 * torch.randn(len(PARAMS), vocab_size, generator=generator)
        logits[:, position] = float("-inf")
        logits = logits.to(device)
        how = SamplingTensors.of(PARAMS, [1_000 * position + 7] * len(PARAMS), device)
        chosen, expected = sample_batch(logits, how), sample_reference(logits, how)
        assert chosen[0] == logits[0].argmax(), "a greedy row is not near, it is exact"
        num_other += int((chosen != expected).sum())
    assert num_other <= MAX_SHARE_OTHER * num_positions * len(PARAMS)


def check_ties(device: str) -> None:
    """All that tie at the edge of top-k or top-p may win; greedy takes the lowest id."""
    logits = torch.full((1, 64), -20.0)
    logits[0, [9, 20, 33, 50]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        # exp(1) of exp(1) + 3 is 0.475: the three that tie come in together.
        SamplingParams(temperature=1.0, top_p=0.5),
    ):
        assert candidates(logits[0], params)[0].tolist() == [9, 20, 33, 50]
        how = [SamplingTensors.of([params], [position], device) for position in range(60)]
        won = {int(sample_batch(logits.to(device), each)) for each in how}
        assert won == {9, 20, 33, 50}
    logits[0, 9] = 1.0
    greedy = SamplingTensors.of([replace(params, temperature=0.0)], [0], device)
    assert sample_batch(logits.to(device), greedy).tolist() == [9]
