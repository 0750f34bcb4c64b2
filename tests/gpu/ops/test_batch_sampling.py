"""Sampling on a GPU, inside a CUDA graph: the tokens that a CPU chooses."""

from __future__ import annotations

import pytest
import torch

from shared.ops.adjustments import Adjustments, Penalties, adjust_logits
from shared.ops.batch_sampling import SamplingTensors, sample_batch
from shared.ops.sampling import SamplingParams, sample

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 32_000

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, min_p=0.05, seed=(1 << 64) - 1),
    SamplingParams(temperature=3.0, top_p=0.99, seed=7),
]


def adjustments(device: str) -> Adjustments:
    """Return a bias and penalties for four rows."""
    generator = torch.Generator().manual_seed(3)
    said = Penalties(
        repetition=torch.tensor([1.0, 1.3, 1.0, 1.1]).to(device),
        presence=torch.tensor([0.0, 0.0, 0.5, 0.0]).to(device),
        frequency=torch.tensor([0.0, 0.0, 0.25, 0.0]).to(device),
        is_in_prompt=(torch.rand(4, VOCAB_SIZE, generator=generator) < 0.1).to(device),
        counts=torch.randint(0, 2, (4, VOCAB_SIZE), generator=generator, dtype=torch.int32).to(
            device
        ),
    )
    bias_ids = torch.tensor([[5, 9], [5, 0], [7, 8], [0, 0]]).to(device)
    bias = torch.tensor([[3.0, -torch.inf], [-1.0, 0.0], [1.0, 2.0], [0.0, 0.0]]).to(device)
    return Adjustments(bias_ids=bias_ids, bias=bias, penalties=said)


def test_a_graph_chooses_what_a_cpu_chooses() -> None:
    """Captured once and replayed over other logits and positions, as decoding does."""
    logits = torch.zeros(4, VOCAB_SIZE, device="cuda")
    how, changes = SamplingTensors.of(PARAMS, [0] * 4, "cuda"), adjustments("cuda")

    def step() -> torch.Tensor:
        adjusted = logits.clone()
        adjust_logits(adjusted, changes)
        return sample_batch(adjusted, how)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = step()

    num_equal = 0
    for round_ in range(50):
        torch.manual_seed(round_)
        on_cpu = torch.randn(4, VOCAB_SIZE) * 4
        places = [11 * round_ + row for row in range(4)]
        logits.copy_(on_cpu)
        how.positions.copy_(torch.tensor(places))
        graph.replay()
        adjust_logits(on_cpu, adjustments("cpu"))
        num_equal += int((chosen.cpu() == sample(on_cpu, PARAMS, places)).sum())
    # Logarithms differ in the last bit between the two, which may turn a near tie.
    assert num_equal >= 199


def test_nothing_waits_for_the_device() -> None:
    """Torch raises where a call would block the host."""
    logits = torch.randn(4, VOCAB_SIZE, device="cuda")
    changes = adjustments("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        adjust_logits(logits, changes)
        sample_batch(logits, SamplingTensors.of(PARAMS, [0, 1, 2, 3], "cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
