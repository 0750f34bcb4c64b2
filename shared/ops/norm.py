"""RMSNorm, alone and behind a residual addition.

Computed in float32 whatever the activations are kept in, since the mean of squares of a bfloat16
row would lose most of its digits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · weight`, row by row.

    Args:
        x: [num_tokens, hidden_size], float32 or bfloat16.
        weight: [hidden_size], float32.
        eps: Added to the mean of squares.

    Returns:
        [num_tokens, hidden_size] in the type of `x`.
    """
    # For one row on the CPU what counts is the number of calls into torch: this takes half the time
    # of `functional.rms_norm`, and a conversion that changes nothing is a call like any other.
    wide = x if x.dtype is torch.float32 else x.float()
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = (wide * scale).mul_(weight)
    return normed if wide is x else normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return the RMSNorm of the sum.

    Args:
        x: [num_tokens, hidden_size], what a layer's half computed.
        residual: As `x`; holds the sum afterwards.
        weight: [hidden_size], float32.
        eps: Added to the mean of squares.

    Returns:
        [num_tokens, hidden_size] in the type of `x`.
    """
    return rms_norm(residual.add_(x), weight, eps)
