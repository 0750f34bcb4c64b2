"""The product of one row with a large matrix, as fast as the matrix can be read.

Every weight is read once, and what that takes is memory bandwidth and nothing else.  So there are
many thread blocks with few outputs each, and every one has its first weights under way before its
input is there.  The norm in front of a product, and the gate or the sum behind it, cost nothing
here and save a launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.triton.gemv_kernel import gemv_kernel
from shared.ops.triton.launch import Launch, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvPlan:
    """How a product is cut."""

    outputs: int
    """Of a thread block; a power of two."""
    columns: int
    """Loaded at once; a power of two that divides the matrix's width."""
    num_stages: int
    """Loads in flight."""
    num_warps: int

    def fits(self, width: int) -> bool:
        """Whether a row of this width can be cut so."""
        return width % self.columns == 0


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    plan: GemvPlan,
    norm: Tensor | None = None,
    eps: float = 0.0,
    is_gate: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x` times the transpose of `weight`, summed in float32.

    Args:
        x: [1, width], contiguous.
        weight: [num_outputs, width], contiguous, in the dtype of `x`.
        plan: How to cut it.
        norm: [width] float32: multiply the RMSNorm of the row with these weights instead.
        eps: Added to the mean of squares of that norm.
        is_gate: The first half of `weight` is a gate: return `silu(gate) · up`, half as wide.
        residual: [1, num_outputs], contiguous: add to it, in place, and return it.
        out_dtype: Of the result; by default that of `x`.

    Raises:
        ShapeError: A shape is not as above, or the plan does not fit it.
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // (2 if is_gate else 1)
    if num_rows != 1 or weight.shape[1] != width or weight.dtype is not x.dtype:
        raise ShapeError(
            f"{[*weight.shape]} {weight.dtype} is no matrix for one row, {[*x.shape]} {x.dtype}"
        )
    if not (x.is_contiguous() and weight.is_contiguous() and plan.fits(width)):
        raise ShapeError(f"rows of {width} must be contiguous and multiples of {plan.columns}")
    if residual is None:
        out = x.new_empty(1, num_outputs, dtype=out_dtype or x.dtype)
    elif residual.shape != (1, num_outputs) or not residual.is_contiguous():
        raise ShapeError(f"{[*residual.shape]} cannot take a row of {num_outputs}")
    else:
        out = residual
    _GEMV(
        (ceil_div(num_outputs, plan.outputs), 1, 1),
        out,
        x,
        weight,
        x if norm is None else norm,
        eps,
        num_outputs,
        num_rows,
        WIDTH=width,
        OUTPUTS=plan.outputs,
        COLUMNS=plan.columns,
        STAGES=plan.num_stages,
        HAS_NORM=norm is not None,
        IS_GATE=is_gate,
        IS_SUM=residual is not None,
        num_warps=plan.num_warps,
    )
    return out


_GEMV = Launch(gemv_kernel)
