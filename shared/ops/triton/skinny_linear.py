"""Products of up to 64 rows with a large matrix: weights stream through the matrix units once.

The weights are the tall operand of the matrix units and the rows the narrow one, so that no unit
computes padding beyond a multiple of 16 rows.  Where a matrix has too few outputs to keep every
multiprocessor loading, its columns are cut too; whichever part of a tile is done last adds the
others to it, in the order of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.triton.dependent_launch import dependent_launch
from shared.ops.triton.skinny_kernel import skinny_kernel

MAX_ROWS = 64

WARP_THREADS = 32

PREFETCH_ASM = "{{ cp.async.bulk.prefetch.L2.global [$1], {}; mov.u32 $0, 0; }}"


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
    prefetch_bytes: int = 0
    """Of each output's weights, fetched into the second cache before the input is there."""

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be cut so."""
        return width % (self.columns * self.splits) == 0


class SkinnyLinear:
    """The product, with the scratch memory that split columns need, on one stream at a time.

    Args:
        max_tiles: Most tiles of a split product, times its parts.
        device: Where it will run.
    """

    def __init__(self, *, max_partials: int, max_tiles: int, device: torch.device) -> None:
        self._partials = torch.empty(max_partials, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_tiles, dtype=torch.int32, device=device)

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
        """Return `x` times the transpose of `weight`, summed in float32."""
        num_rows, width = x.shape
        num_outputs = weight.shape[0] // (2 if is_gate else 1)
        num_tiles = triton.cdiv(num_outputs, plan.outputs)
        rows = max(16, triton.next_power_of_2(num_rows))
        if weight.shape[1] != width or num_rows > MAX_ROWS or weight.dtype is not x.dtype:
            raise ShapeError(f"{[*weight.shape]} {weight.dtype} is not for {[*x.shape]} {x.dtype}")
        if not plan.fits(width) or (is_gate and plan.splits > 1):
            raise ShapeError(f"{plan} does not cut rows of {width}")
        num_pieces = max(1, WARP_THREADS * plan.num_warps // plan.outputs)
        piece_bytes = plan.prefetch_bytes // num_pieces
        out = residual
        if out is None:
            out = x.new_empty(num_rows, num_outputs, dtype=out_dtype or x.dtype)
        skinny_kernel[(num_tiles, plan.splits)](
            out,
            x,
            weight,
            self._partials,
            self._counters,
            num_rows,
            num_outputs,
            WIDTH=width,
            ROWS=rows,
            OUTPUTS=plan.outputs,
            COLUMNS=plan.columns,
            SPLITS=plan.splits,
            STAGES=plan.num_stages,
            IS_GATE=is_gate,
            IS_SUM=residual is not None,
            PREFETCH=PREFETCH_ASM.format(piece_bytes) if piece_bytes else "",
            PREFETCH_BYTES=piece_bytes,
            PREFETCHES=num_pieces,
            num_warps=plan.num_warps,
            **dependent_launch(x.device),
        )
        return out
