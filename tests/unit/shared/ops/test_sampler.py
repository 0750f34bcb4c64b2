"""The sampler of a device."""

from __future__ import annotations

import torch

from shared.ops.batch_sampling import sample_batch
from shared.ops.sampler import sampler_for, warm_up_sampler


def test_a_cpu_gets_the_reference_and_needs_no_warming() -> None:
    """Everything else about samplers is what `sample_batch` promises."""
    cpu = torch.device("cpu")
    assert sampler_for(cpu) is sample_batch
    warm_up_sampler(cpu, 20)
