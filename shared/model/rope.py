"""Wavelengths of the rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_wavelengths(head_dim: int, theta: float) -> Tensor:
    """Return the angle, in radians a position, by which each pair of dimensions turns.

    Args:
        head_dim: Dimensions of a head, even.
        theta: Base of the geometric series, `ModelSpec.rope_theta`.

    Returns:
        [head_dim / 2] float32: `theta ** (-2i / head_dim)`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents
