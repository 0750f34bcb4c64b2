"""Wavelengths of the rotary position embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from shared.model.spec import RopeScaling


def inverse_wavelengths(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the angle, in radians a position, by which each pair of dimensions turns.

    Args:
        head_dim: Dimensions of a head, even.
        theta: Base of the geometric series, `ModelSpec.rope_theta`.
        scaling: How slow pairs are slowed further; None leaves the series as it is.

    Returns:
        [head_dim / 2] float32: `theta ** (-2i / head_dim)`, scaled.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = 1.0 / theta**exponents
    return angles if scaling is None else _scaled(angles, scaling)


def _scaled(angles: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_context_tokens * angles / (2 * math.pi)
    # 0 for pairs that turn fewer than `low_freq_factor` times over the original context, 1 for
    # those that turn more than `high_freq_factor` times.
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return angles * (share + (1 - share) / scaling.factor)
