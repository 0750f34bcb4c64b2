"""RMSNorm, alone and behind a residual addition, one row a thread block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.errors import ShapeError
from shared.ops.triton.launch import Launch, padded

ELEMENTS_A_WARP = 512
"""16 a thread: two loads of 16 bytes in bfloat16."""

MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each row; see `shared.ops.norm`.

    Raises:
        ShapeError: A tensor is not contiguous or not of the row's width.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return the RMSNorm of the sum; see `shared.ops.norm`.

    Raises:
        ShapeError: As `rms_norm`, or `x` and `residual` are not alike.
    """
    if residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_contiguous():
        raise ShapeError(
            f"{[*residual.shape]} {residual.dtype} cannot hold the sum with {[*x.shape]} {x.dtype}"
        )
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Norm `x`, or the sum of `x` and `residual`, which it leaves in `residual`."""
    num_tokens, width = x.shape
    if weight.shape != (width,) or not x.is_contiguous():
        raise ShapeError(f"rows of {width} need as many weights, not {[*weight.shape]}")
    normed = torch.empty_like(x)
    padded_width = padded(width)
    _RMS_NORM(
        (num_tokens, 1, 1),
        normed,
        x,
        x if residual is None else residual,
        weight,
        eps,
        WIDTH=width,
        PADDED_WIDTH=padded_width,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(MAX_WARPS, max(1, padded_width // ELEMENTS_A_WARP)),
    )
    return normed


@triton.jit
def _rms_norm_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    normed: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Norm one row in float32."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED_WIDTH)
    is_column = column < WIDTH
    if IS_DEPENDENT:
        gdc_launch_dependents()
    scales = tl.load(weight + column, mask=is_column, other=0.0)
    if IS_DEPENDENT:
        gdc_wait()
    row = tl.load(x + first + column, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        old = tl.load(residual + first + column, mask=is_column, other=0.0)
        # Rounded as it is kept: the norm is of what the next addition will find.
        row = (row.to(tl.float32) + old.to(tl.float32)).to(row.dtype)
        tl.store(residual + first + column, row, mask=is_column)
    wide = row.to(tl.float32)
    mean_square = tl.sum(wide * wide, 0) / WIDTH
    result = wide * tl.rsqrt(mean_square + eps) * scales
    tl.store(normed + first + column, result.to(row.dtype), mask=is_column)


_RMS_NORM = Launch(_rms_norm_kernel)
