"""Rotary position embedding in the half-rotation layout.

Dimension `i` and dimension `i + head_dim / 2` of a head are one point in a plane, turned by
`position · theta^(-2i / head_dim)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotary_angles(positions: Tensor, inverse_wavelengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `apply_rotary` multiplies with, for one step's tokens.

    A table over all positions would take 128 MiB at a context of 128k tokens; this takes some
    microseconds a step, whatever the number of layers.

    Args:
        positions: [num_tokens] int64.
        inverse_wavelengths: [head_dim / 2] float32, radians a position.

    Returns:
        Cosines and signed sines, each [num_tokens, 1, head_dim] float32.  The first half of the
        sines is negated, so a rotation is `x · cos + swap_halves(x) · sin`.
    """
    angles = torch.outer(positions.float(), inverse_wavelengths)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the heads of `x` turned by their token's angles, computed in float32.

    Args:
        x: [num_tokens, num_heads, head_dim], any strides; queries and keys may be turned at once.
        cos: [num_tokens, 1, head_dim] float32, of `rotary_angles`.
        sin: As `cos`.

    Returns:
        A new contiguous tensor like `x`.
    """
    wide = x if x.dtype is torch.float32 else x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    turned = swapped.mul_(sin).addcmul_(wide, cos)
    return turned if wide is x else turned.to(x.dtype)
