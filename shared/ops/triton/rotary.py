"""The rotation's angles in one launch, where torch needs eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.triton.launch import Launch, padded


def rotary_angles(positions: Tensor, inverse_wavelengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines for a step's tokens; see `shared.ops.rotary`."""
    num_tokens, half = positions.shape[0], inverse_wavelengths.shape[0]
    cos, sin = (
        torch.empty(num_tokens, 1, 2 * half, dtype=torch.float32, device=positions.device)
        for _ in range(2)
    )
    _ROTARY_ANGLES(
        (num_tokens, 1, 1),
        cos,
        sin,
        positions,
        inverse_wavelengths,
        HALF=half,
        PADDED_HALF=padded(half),
        num_warps=1,
    )
    return cos, sin


@triton.jit
def _rotary_angles_kernel(
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    inverse_wavelengths: tl.tensor,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Write one token's row of both."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    is_pair = pair < HALF
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(inverse_wavelengths + pair, mask=is_pair, other=0.0)
    place = token * 2 * HALF + pair
    cosine, sine = tl.cos(angle), tl.sin(angle)
    tl.store(cos + place, cosine, mask=is_pair)
    tl.store(cos + place + HALF, cosine, mask=is_pair)
    tl.store(sin + place, -sine, mask=is_pair)
    tl.store(sin + place + HALF, sine, mask=is_pair)


_ROTARY_ANGLES = Launch(_rotary_angles_kernel)
