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
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATE: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Compute some outputs."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, COLUMNS)
    # Behind the last output the last one is computed again, and not stored.
    source = tl.minimum(output, num_outputs - 1)
    weights = weight + source[:, None] * WIDTH + column[None, :]
    up_weights = weights + num_outputs.to(tl.int64) * WIDTH
    totals = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    up_totals = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        tile = tl.load(weights + start)
        if IS_GATE:
            up_tile = tl.load(up_weights + start)
        part = tl.zeros([COLUMNS], tl.float32)
        # Always so, but the compiler cannot know: what stands behind a condition it loads in its
        # turn, while the weights, which are nobody's output, it loads some turns ahead.  So the
        # first of them are under way before the wait.
        if num_rows > 0:
            if IS_DEPENDENT:
                gdc_wait()
            part = tl.load(x + start + column).to(tl.float32)
            if HAS_NORM:
                squares += part * part
                part *= tl.load(norm + start + column)
        # Threads add up among themselves only once, at the end.
        totals += tile.to(tl.float32) * part[None, :]
        if IS_GATE:
            up_totals += up_tile.to(tl.float32) * part[None, :]

    total = tl.sum(totals, 1)
    scale = 1.0
    if HAS_NORM:
        # Of a whole row one factor is left: the root of its mean square.
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        total *= scale
    if IS_GATE:
        total = total / (1.0 + tl.exp(-total)) * (tl.sum(up_totals, 1) * scale)
    is_output = output < num_outputs
    if IS_SUM:
        total += tl.load(out + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=is_output)
