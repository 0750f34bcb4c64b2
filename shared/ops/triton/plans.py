"""How the products of a decode step are cut: the fastest of what was measured on an H200.

By shapes alone, so that the same step is computed alike every time.  Measured with the matrices of
Llama-3.1-8B, inside whole steps; `tests/benchmarks/LOG.md` has the figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shared.ops.triton.gemv import GemvPlan
from shared.ops.triton.skinny_linear import MAX_ROWS, SkinnyPlan

if TYPE_CHECKING:
    from torch import Tensor

MAX_SPLIT_ROWS = 16
"""Up to here split columns beat cuBLAS for square matrices; with more rows, not any more."""

WIDE = 8_192
"""Rows of more numbers keep a thread block busy for long, and want few of them in it at once."""

MANY_OUTPUTS = 32_768
"""What only an output matrix has."""

NUM_MULTIPROCESSORS = 132
"""Of an H200.  A constant, so that sums are split alike on every GPU."""

MIN_OUTPUTS = 4

MIN_COLUMNS = 64
"""128 bytes of a row: less in one piece wastes memory bandwidth."""


def plan_for(x: Tensor, weight: Tensor, *, is_gate: bool = False) -> GemvPlan | SkinnyPlan | None:
    """Return how to cut a product of rows with a matrix, or None where cuBLAS is as good.

    Args:
        x: [num_rows, width].
        weight: [num_outputs, width].
        is_gate: The product is a gate and what passes it, which then are one kernel.
    """
    num_rows, width = x.shape
    if x.dtype is torch.float32 or num_rows > MAX_ROWS:  # exact sums are cuBLAS's
        return None
    num_outputs = weight.shape[0] // (2 if is_gate else 1)
    if num_rows == 1:
        return _gemv_plan(num_outputs, width, is_gate=is_gate)
    plan = _skinny_plan(num_rows, num_outputs, width, is_gate=is_gate)
    return plan if plan is not None and plan.fits(num_rows, num_outputs, width) else None


def _gemv_plan(num_outputs: int, width: int, *, is_gate: bool) -> GemvPlan | None:
    if is_gate:
        plan = GemvPlan(outputs=8, columns=512, num_stages=3, num_warps=4)
    elif width > WIDE:
        plan = GemvPlan(outputs=4, columns=1024, num_stages=4, num_warps=2)
    elif num_outputs > MANY_OUTPUTS:
        plan = GemvPlan(outputs=8, columns=512, num_stages=4, num_warps=4)
    else:
        plan = GemvPlan(outputs=16, columns=512, num_stages=3, num_warps=4)
    columns = min(plan.columns, width & -width)
    if columns < MIN_COLUMNS:
        return None
    # As many numbers in one load, if the width wants it narrower; fewer, if too few thread blocks
    # would be left.
    outputs = plan.outputs * plan.columns // columns
    while outputs > MIN_OUTPUTS and num_outputs < outputs * NUM_MULTIPROCESSORS:
        outputs //= 2
    return replace(plan, outputs=outputs, columns=columns)


def _skinny_plan(
    num_rows: int, num_outputs: int, width: int, *, is_gate: bool
) -> SkinnyPlan | None:
    is_few = num_rows <= MAX_SPLIT_ROWS
    if num_outputs > MANY_OUTPUTS and is_few:
        return SkinnyPlan(outputs=64, columns=128, splits=1, num_stages=4, num_warps=4)
    if num_outputs > MANY_OUTPUTS:
        return SkinnyPlan(outputs=128, columns=64, splits=1, num_stages=5, num_warps=8)
    if is_gate and not is_few:
        return SkinnyPlan(outputs=64, columns=64, splits=1, num_stages=5, num_warps=4)
    if is_few and not is_gate and width <= WIDE:
        return SkinnyPlan(outputs=64, columns=128, splits=4, num_stages=3, num_warps=4)
    return None
