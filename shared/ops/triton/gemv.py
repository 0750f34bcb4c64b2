"""Products of a few rows with a large matrix, as fast as the matrix can be read.

Every weight is read once and used for all rows; what that takes is memory bandwidth and nothing
else.  So a thread block takes few outputs and many columns, loads the first of them before it waits
for its input, and there are many thread blocks.  The norm in front of a product and the gate or the
sum behind it cost nothing here, and save a launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.triton.dependent_launch import dependent_launch
from shared.ops.triton.gemv_kernel import gemv_kernel

MAX_ROWS = 4
"""More would need more arithmetic than the time in which the weights are read allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvPlan:
    """How a product is cut."""

    outputs: int
    """Of a thread block; a power of two."""
    columns: int
    """Loaded at once; a power of two."""
    num_warps: int


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
        x: [num_rows, width], contiguous, at most `MAX_ROWS` rows.
        weight: [num_outputs, width], contiguous, in the dtype of `x`.
        plan: How to cut it.
        norm: [width] float32: multiply the RMSNorm of each row with these weights instead.
        eps: Added to the mean of squares of that norm.
        is_gate: The first half of `weight` is a gate: return `silu(gate) · up`, half as wide.
        residual: [num_rows, num_outputs]: add to it, in place, and return it.
        out_dtype: Of the result; by default that of `x`.

    Raises:
        ShapeError: A shape is not as above.
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // (2 if is_gate else 1)
    if weight.shape[1] != width or num_rows > MAX_ROWS or weight.dtype is not x.dtype:
        raise ShapeError(
            f"{[*weight.shape]} {weight.dtype} is not for rows {[*x.shape]} {x.dtype}, "
            f"of which {MAX_ROWS} are the most"
        )
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ShapeError("rows and weights must be contiguous")
    if residual is None:
        out = x.new_empty(num_rows, num_outputs, dtype=out_dtype or x.dtype)
    elif residual.shape != (num_rows, num_outputs) or not residual.is_contiguous():
        raise ShapeError(f"{[*residual.shape]} cannot take {num_rows} rows of {num_outputs}")
    else:
        out = residual
    gemv_kernel[(triton.cdiv(num_outputs, plan.outputs),)](
        out,
        x,
        weight,
        weight if norm is None else norm,
        eps,
        num_outputs,
        num_rows,
        WIDTH=width,
        ROWS=triton.next_power_of_2(num_rows),
        OUTPUTS=plan.outputs,
        COLUMNS=plan.columns,
        HAS_NORM=norm is not None,
        IS_GATE=is_gate,
        IS_SUM=residual is not None,
        num_warps=plan.num_warps,
        **dependent_launch(x.device),
    )
    return out
