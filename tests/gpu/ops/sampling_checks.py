"""What sampling on a GPU must show, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import torch

from shared.ops.sampling import SamplingParams, candidates
from shared.ops.sampling_tensors import SamplingTensors
from shared.ops.sampling_tensors import sample as sample_reference
from shared.ops.triton.sampling import sample

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
)

MAX_SHARE_OTHER = 0.01
"""Noise and edges are computed with another logarithm and other sums: where two tokens come within
some 1e-6 of each other, another one may win."""


def check_sampling(device: str, *, vocab_size: int, num_positions: int) -> None:
    """Every kind of parameters, at every position, chooses what the reference chooses."""
    generator = torch.Generator().manual_seed(vocab_size)
    tensors = SamplingTensors.greedy(len(PARAMS), device)
    tensors.fill(PARAMS)
    num_other = 0
    for position in range(num_positions):
        logits = 4 * torch.randn(len(PARAMS), vocab_size, generator=generator)
        logits[:, position] = float("-inf")
        logits = logits.to(device)
        tensors.positions.fill_(1_000 * position + 7)
        chosen, expected = sample(logits, tensors), sample_reference(logits, tensors)
        assert chosen[0] == logits[0].argmax(), "a greedy row is not near, it is exact"
        num_other += int((chosen != expected).sum())
    assert num_other <= MAX_SHARE_OTHER * num_positions * len(PARAMS)


def check_ties(device: str) -> None:
    """All that tie at the edge of top-k or top-p may win; greedy takes the lowest id."""
    logits = torch.full((1, 64), -20.0)
    logits[0, [9, 20, 33, 50]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    logits = logits.to(device)
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        # exp(1) of exp(1) + 3 is 0.475: the three that tie come in together.
        SamplingParams(temperature=1.0, top_p=0.5),
    ):
        assert candidates(logits[0].cpu(), params)[0].tolist() == [9, 20, 33, 50]
        tensors = SamplingTensors.greedy(1, device)
        tensors.fill([params])
        won: set[int] = set()
        for position in range(60):
            tensors.positions.fill_(position)
            won |= set(sample(logits, tensors).tolist())
        assert won == {9, 20, 33, 50}
    logits[0, 9] = 1.0
    assert sample(logits, SamplingTensors.greedy(1, device)).tolist() == [9]
