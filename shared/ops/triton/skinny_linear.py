"""Products of up to 64 rows with a large matrix: weights stream through the matrix units once.

The weights are the tall operand of the matrix units and the rows the narrow one, so that no unit
computes padding beyond a multiple of 16 rows.  Where a matrix has too few outputs to keep every
multiprocessor loading, its columns are cut too; whichever part of a tile is done last adds the
others to it, in the order of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.triton.launch import Launch, ceil_div, padded
from shared.ops.triton.skinny_kernel import skinny_kernel

MAX_ROWS = 64

MAX_TILES = 1024
MAX_PARTIALS = 1 << 21
"""Of a product whose columns are split: 8 MiB, enough for 8,192 outputs, 64 rows and 4 parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyPlan:
    """How a product is cut."""

    outputs: int
    """Of a thread block; a power of two."""
    columns: int
    """Loaded at once; a power of two."""
    splits: int
    """Parts that the columns are cut into, each a multiple of `columns`."""
    num_stages: int
    """Loads in flight."""
    num_warps: int

    def fits(self, num_rows: int, num_outputs: int, width: int) -> bool:
        """Whether a product of this shape can be cut so, and its parts kept."""
        if width % (self.columns * self.splits):
            return False
        num_tiles = ceil_div(num_outputs, self.outputs)
        num_partials = num_tiles * self.outputs * self.splits * _padded_rows(num_rows)
        return self.splits == 1 or (num_tiles <= MAX_TILES and num_partials <= MAX_PARTIALS)


class SkinnyLinear:
    """The product, with the scratch memory that split columns need, on one stream at a time.

    Args:
        device: Where it will run.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
        self._counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        plan: SkinnyPlan,
        is_gate: bool = False,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return `x` times the transpose of `weight`, summed in float32.

        Args:
            x: [num_rows, width], contiguous, at most `MAX_ROWS` rows.
            weight: [num_outputs, width], contiguous, in the dtype of `x`.
            plan: How to cut it.
            is_gate: The first half of `weight` is a gate: return `silu(gate) · up`, half as wide.
            residual: [num_rows, num_outputs], contiguous: add to it, in place, and return it.
            out_dtype: Of the result; by default that of `x`.

        Raises:
            ShapeError: A shape is not as above, or the plan does not fit it.
        """
        num_rows, width = x.shape
        num_outputs = weight.shape[0] // (2 if is_gate else 1)
        num_tiles = ceil_div(num_outputs, plan.outputs)
        if weight.shape[1] != width or num_rows > MAX_ROWS or weight.dtype is not x.dtype:
            raise ShapeError(
                f"{[*weight.shape]} {weight.dtype} is no matrix for rows {[*x.shape]} {x.dtype}, "
                f"of which {MAX_ROWS} are the most"
            )
        if not (x.is_contiguous() and weight.is_contiguous()):
            raise ShapeError("rows and weights must be contiguous")
        if not plan.fits(num_rows, num_outputs, width) or (is_gate and plan.splits > 1):
            raise ShapeError(f"{plan} does not cut {num_rows} rows of {width} for {num_outputs}")
        if residual is None:
            out = x.new_empty(num_rows, num_outputs, dtype=out_dtype or x.dtype)
        elif residual.shape != (num_rows, num_outputs) or not residual.is_contiguous():
            raise ShapeError(f"{[*residual.shape]} cannot take {num_rows} rows of {num_outputs}")
        else:
            out = residual
        _SKINNY(
            (num_tiles, plan.splits, 1),
            out,
            x,
            weight,
            self._partials,
            self._counters,
            num_rows,
            num_outputs,
            WIDTH=width,
            ROWS=_padded_rows(num_rows),
            OUTPUTS=plan.outputs,
            COLUMNS=plan.columns,
            SPLITS=plan.splits,
            STAGES=plan.num_stages,
            IS_GATE=is_gate,
            IS_SUM=residual is not None,
            num_warps=plan.num_warps,
        )
        return out


def _padded_rows(num_rows: int) -> int:
    """Return how many rows are computed; the matrix units take no fewer than 16."""
    return max(16, padded(num_rows))


_SKINNY = Launch(skinny_kernel)
