"""Sampling on a GPU without a sort: what `shared.ops.batch_sampling` chooses, in one launch.

A thread block takes a row.  A greedy row costs one pass over its logits, a drawn one another pass
for the noise.  The edge of top-k is found by value, digit by digit over the bits of the scaled
logits; that of top-p need not be found at all, since a draw from more tokens that ends inside it is
the draw from those inside.  The noise is the same function of (seed, position, vocabulary index) as
on the CPU, so a daemon may go on where another one on a CPU stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.philox import UNIFORM_BITS
from shared.ops.sampling import NOISE_SPAN, NOISE_SPAN_SLACK
from shared.ops.triton.launch import Launch, padded
from shared.ops.triton.sampling_kernel import sample_kernel

if TYPE_CHECKING:
    from shared.ops.batch_sampling import SamplingTensors

MAX_TILE = 4096
"""Logits looked at at once: 8 a thread."""

NUM_WARPS = 16


def sample_batch(logits: Tensor, how: SamplingTensors) -> Tensor:
    """Choose one token for every row; see `shared.ops.batch_sampling.sample_batch`.

    A graph that was captured over `how` follows whatever is copied into it.

    Raises:
        ShapeError: As there, or a row's logits are not contiguous float32.

    Enqueues on the current stream and returns at once.
    """
    batch, vocab_size = logits.shape
    if batch != how.positions.shape[0]:
        raise ShapeError(f"{batch} rows and {how.positions.shape[0]} parameters")
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ShapeError(f"a row's logits must be contiguous float32, not {logits.dtype}")
    chosen = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _SAMPLE(
        (batch, 1, 1),
        chosen,
        logits,
        how.is_greedy,
        how.temperature,
        how.top_k,
        how.top_p,
        how.log_min_p,
        how.seed_words.contiguous(),
        how.positions,
        vocab_size,
        logits.stride(0),
        NOISE_SPAN=NOISE_SPAN + NOISE_SPAN_SLACK,
        UNIFORM_BITS=UNIFORM_BITS,
        TILE=min(MAX_TILE, padded(vocab_size)),
        num_warps=NUM_WARPS,
    )
    return chosen


_SAMPLE = Launch(sample_kernel)
