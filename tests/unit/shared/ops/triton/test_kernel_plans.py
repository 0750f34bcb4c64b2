"""How products are cut: always so that it fits, and only where it is of use."""

from __future__ import annotations

import pytest
import torch

from shared.ops.triton.gemv import GemvPlan
from shared.ops.triton.plans import plan_for
from shared.ops.triton.skinny_linear import SkinnyPlan

SHAPES = [(6_144, 4_096), (4_096, 14_336), (128_256, 4_096), (960, 576), (576, 1_536), (20, 42)]


@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64])
def test_a_plan_fits_what_it_is_for(num_rows: int, num_outputs: int, width: int) -> None:
    """A plan that does not would be refused in the middle of a step."""
    x = torch.empty(num_rows, width, dtype=torch.bfloat16, device="meta")
    for is_gate in (False, True):
        rows = num_outputs * (2 if is_gate else 1)
        weight = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        plan = plan_for(x, weight, is_gate=is_gate)
        if isinstance(plan, GemvPlan):
            assert num_rows == 1
            assert plan.fits(width)
        elif isinstance(plan, SkinnyPlan):
            assert plan.fits(num_rows, num_outputs, width)
            assert plan.splits == 1 or not is_gate


def test_one_row_is_always_a_kernel_of_ours() -> None:
    """For every matrix of the models that are served."""
    x = torch.empty(1, 4_096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(6_144, 4_096, dtype=torch.bfloat16, device="meta")
    assert isinstance(plan_for(x, weight), GemvPlan)


def test_float32_and_prompts_are_left_to_the_library() -> None:
    """float32 is there to be exact, and many rows are bound by arithmetic."""
    weight = torch.empty(6_144, 4_096, device="meta")
    assert plan_for(torch.empty(1, 4_096, device="meta"), weight) is None
    many = torch.empty(65, 4_096, dtype=torch.bfloat16, device="meta")
    assert plan_for(many, weight.bfloat16()) is None
