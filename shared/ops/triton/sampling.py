"""Sampling on a GPU without the host: what `shared.ops.sampling` chooses, inside a CUDA graph.

A thread block takes a row.  A greedy row costs one pass over its logits.  The edges of top-k and
top-p are found by value, digit by digit over the bits of the scaled logits, so nothing is sorted
and tokens that tie at an edge are all kept.  The noise is the same function of (seed, position,
vocabulary index) as on the CPU, so a daemon may go on where another one on a CPU stopped.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.philox import UNIFORM_BITS
from shared.ops.sampling import NOISE_SPAN, NOISE_SPAN_SLACK
from shared.ops.sampling_tensors import SamplingTensors
from shared.ops.triton.dependent_launch import dependent_launch
from shared.ops.triton.sampling_kernel import sample_kernel

MAX_TILE = 4096
"""Logits looked at at once: 8 a thread."""

NUM_WARPS = 16


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Choose one token for every row; see `shared.ops.sampling_tensors.sample`.

    Raises:
        ShapeError: As there.

    Enqueues on the current stream and returns at once.
    """
    params.check(logits)
    if logits.stride(1) != 1:
        raise ShapeError("a row's logits must be contiguous")
    batch, vocab_size = logits.shape
    chosen = torch.empty(batch, dtype=torch.int64, device=logits.device)
    sample_kernel[(batch,)](
        chosen,
        logits,
        params.temperatures,
        params.top_ks,
        params.top_ps,
        params.seeds,
        params.positions,
        vocab_size,
        logits.stride(0),
        NOISE_SPAN=NOISE_SPAN + NOISE_SPAN_SLACK,
        UNIFORM_BITS=UNIFORM_BITS,
        TILE=min(MAX_TILE, triton.next_power_of_2(vocab_size)),
        num_warps=NUM_WARPS,
        **dependent_launch(logits.device),
    )
    return chosen
