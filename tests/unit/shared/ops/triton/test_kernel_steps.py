"""The kernels around attention against their references."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.gather_blocks import gather_blocks
from shared.ops.triton.norm import add_rms_norm
from tests.gpu.ops.kernel_checks import (
    check_argmax,
    check_context,
    check_gather_blocks,
    check_gemv,
    check_norm,
    check_rope_kv_write,
    check_rotary_angles,
    check_silu_mul,
    check_skinny,
)

# The interpreter rounds to bfloat16 towards zero, so bfloat16 is for `tests/gpu`.
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((7, 1), 80)])
def test_rotated_keys_land_in_their_slots(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    """Queries are returned, padding writes nothing, values pass through bit for bit."""
    check_rope_kv_write(dtype, "cpu", heads=heads, head_dim=head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576])
def test_rows_are_normed_and_the_residual_keeps_the_sum(width: int, dtype: torch.dtype) -> None:
    """The next half of the layer adds to it."""
    check_norm(dtype, "cpu", width=width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_applied_to_the_last_column(dtype: torch.dtype) -> None:
    """A row's width is no multiple of a thread block's."""
    check_silu_mul(dtype, "cpu")


@pytest.mark.parametrize("num_programs", [1, 3, 16])
def test_blocks_arrive_bit_for_bit(num_programs: int) -> None:
    """Fewer thread blocks than pieces, and more than blocks."""
    check_gather_blocks(torch.bfloat16, "cpu", num_programs=num_programs)


def test_angles_are_the_reference_s() -> None:
    """One launch instead of eight."""
    check_rotary_angles("cpu")


@pytest.mark.parametrize("width", [5, 4_097])
def test_the_largest_of_a_row_is_found_in_any_tile(width: int) -> None:
    """Where several are largest the first one wins, as on the CPU."""
    check_argmax("cpu", width=width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_multiplied(dtype: torch.dtype) -> None:
    """Outputs that fill no thread block, and every prologue and epilogue."""
    check_gemv(dtype, "cpu", width=384, num_outputs=20)


@pytest.mark.parametrize("num_rows", [2, 20])
def test_few_rows_are_multiplied(num_rows: int) -> None:
    """Fewer rows than the matrix units take, and more; parts join in one order."""
    check_skinny(torch.float16, "cpu", num_rows=num_rows, width=256, num_outputs=70)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_leave_their_blocks_and_parts_join(dtype: torch.dtype) -> None:
    """What lies behind a context's last token never reaches a product."""
    check_context(dtype, "cpu")


def test_what_does_not_fit_is_refused() -> None:
    """A kernel would read beside its tensors and say nothing."""
    x = torch.zeros(2, 5)
    with pytest.raises(ShapeError, match="rows of 5 numbers"):
        silu_mul(x)
    with pytest.raises(ShapeError, match="rows of 5 need as many weights"):
        add_rms_norm(x, x.clone(), torch.ones(4), 1e-5)
    ids = torch.tensor([0])
    with pytest.raises(ShapeError, match="not whole 16 bytes"):
        gather_blocks(x, x.clone(), ids, ids, num_programs=1)
    with pytest.raises(ShapeError, match="0 thread blocks"):
        gather_blocks(x, x.clone(), ids, ids, num_programs=0)
    with pytest.raises(ShapeError, match="must be int64"):
        gather_blocks(x, x.clone(), ids.int(), ids, num_programs=1)
