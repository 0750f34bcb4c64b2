"""Which implementation chooses a batch's tokens on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.ops.batch_sampling import SamplingTensors, sample_batch
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

Sampler = Callable[[Tensor, SamplingTensors], Tensor]
"""Of the signature of `shared.ops.batch_sampling.sample_batch`."""


def sampler_for(device: torch.device) -> Sampler:
    """Return the fastest sampler for logits on a device."""
    if device.type == "cuda":
        from shared.ops.triton.sampling import sample_batch as sample  # noqa: PLC0415 - a GPU's

        return sample
    return sample_batch


def warm_up_sampler(device: torch.device, vocab_size: int) -> None:
    """Have everything compiled that sampling on this device needs; it takes seconds on a GPU."""
    sampler = sampler_for(device)
    for params in _every_kind():
        sampler(
            torch.zeros(1, vocab_size, device=device), SamplingTensors.of([params], [0], device)
        )


def _every_kind() -> Iterator[SamplingParams]:
    yield SamplingParams()
    yield SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
