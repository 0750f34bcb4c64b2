"""The kernel of `shared.ops.triton.gemv`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_outputs", "num_rows"])
def gemv_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    num_outputs: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATE: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Compute some outputs of all rows."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (output < num_outputs)[:, None]
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    weights = weight + output[:, None] * WIDTH + column[None, :]
    up_weights = weights + num_outputs.to(tl.int64) * WIDTH

    # Weights are nobody's output, so the first of them need not wait for the launch before.
    is_here = is_output & (column < WIDTH)[None, :]
    tile = tl.load(weights, mask=is_here, other=0.0, eviction_policy="evict_first")
    if IS_GATE:
        up_tile = tl.load(up_weights, mask=is_here, other=0.0, eviction_policy="evict_first")
    if IS_DEPENDENT:
        gdc_wait()

    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up_total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        is_column = is_row[:, None] & (start + column < WIDTH)[None, :]
        part = tl.load(
            x + row[:, None] * WIDTH + start + column[None, :], mask=is_column, other=0.0
        ).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(part * part, 1)
            part *= tl.load(norm + start + column, mask=start + column < WIDTH, other=0.0)[None, :]
        total += tl.sum(part[:, None, :] * tile.to(tl.float32)[None, :, :], 2)
        if IS_GATE:
            up_total += tl.sum(part[:, None, :] * up_tile.to(tl.float32)[None, :, :], 2)
        # The next ones are under way while these are summed.
        is_here = is_output & (start + COLUMNS + column < WIDTH)[None, :]
        tile = tl.load(
            weights + start + COLUMNS, mask=is_here, other=0.0, eviction_policy="evict_first"
        )
        if IS_GATE:
            up_tile = tl.load(
                up_weights + start + COLUMNS, mask=is_here, other=0.0, eviction_policy="evict_first"
            )

    if HAS_NORM:
        # Of a whole row one factor is left: the root of its mean square.
        scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
        total *= scale
        up_total *= scale
    if IS_GATE:
        total = total / (1.0 + tl.exp(-total)) * up_total
    target = out + row[:, None] * num_outputs + output[None, :]
    is_target = is_row[:, None] & (output < num_outputs)[None, :]
    if IS_SUM:
        total += tl.load(target, mask=is_target, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=is_target)
