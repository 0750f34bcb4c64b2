"""The kernel of `shared.ops.triton.skinny_linear`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def skinny_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_GATE: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Compute some outputs of all rows, over one part of the columns."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    PART: tl.constexpr = WIDTH // SPLITS
    local = tl.arange(0, OUTPUTS)
    output = tile * OUTPUTS + local
    # Behind the last output the last one is computed again, and not stored.
    source = tl.minimum(output, num_outputs - 1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :]
    weights = weight + source[:, None] * WIDTH + part * PART + column[None, :]
    up_weights = weights + num_outputs.to(tl.int64) * WIDTH
    inputs = x + row[None, :].to(tl.int64) * WIDTH + part * PART + column[:, None]
    if IS_DEPENDENT:
        gdc_wait()
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, PART, COLUMNS, num_stages=STAGES):
        tile_weights = tl.load(weights + start)
        part_inputs = tl.load(inputs + start, mask=is_row, other=0.0)
        total = tl.dot(tile_weights, part_inputs, total)
        if IS_GATE:
            up_total = tl.dot(tl.load(up_weights + start), part_inputs, up_total)
    if IS_GATE:
        total = total / (1.0 + tl.exp(-total)) * up_total

    if SPLITS > 1:
        place = local[:, None] * ROWS + row[None, :]
        SIZE: tl.constexpr = OUTPUTS * ROWS
        mine = partials + tile.to(tl.int64) * SPLITS * SIZE
        tl.store(mine + part * SIZE + place, total)
        # Every thread's stores come before the count, and the count before the loads behind it.
        tl.debug_barrier()
        num_done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if num_done != SPLITS - 1:
            return
        tl.store(counters + tile, 0)
        # In the order of parts, whichever came last: the same sum every time.
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(mine + other * SIZE + place, cache_modifier=".cg")

    target = out + row[:, None].to(tl.int64) * num_outputs + output[None, :]
    is_target = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    result = tl.trans(total)
    if IS_SUM:
        result += tl.load(target, mask=is_target, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=is_target)
