"""How each product of a decode step is cut: what was the fastest of what was measured on an H200."""

from __future__ import annotations

from shared.ops.triton.skinny_linear import SkinnyPlan

SPLIT = {
    "qkv": SkinnyPlan(
        outputs=64, columns=128, splits=2, num_stages=3, num_warps=4, prefetch_bytes=1024
    ),
}


def skinny_plan(num_rows: int, num_outputs: int, width: int, *, is_gate: bool) -> SkinnyPlan | None:
    """Return how to cut a product of a few rows, or None where cuBLAS is as good."""
    if num_rows > 64:
        return None
    columns = 64 if is_gate else 128
    stages = 4 if is_gate else 3
    splits = 1
    if not is_gate:
        while (
            splits < 4 and num_outputs // 64 * splits < 190 and width % (columns * splits * 2) == 0
        ):
            splits *= 2
    plan = SkinnyPlan(
        outputs=64,
        columns=columns,
        splits=splits,
        num_stages=stages,
        num_warps=4,
        prefetch_bytes=1024,
    )
    return plan if plan.fits(width) else None
