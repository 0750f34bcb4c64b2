"""The gate of a gated feed-forward layer in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.errors import ShapeError
from shared.ops.triton.launch import Launch, ceil_div, padded

MAX_COLUMNS = 1024
"""Of a thread block: 8 a thread, one load of 16 bytes in bfloat16."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) · up`; see `shared.ops.activation`.

    Computed in float32 and rounded once, where the reference also rounds `silu(gate)`.

    Raises:
        ShapeError: The rows cannot be halved or are not contiguous.
    """
    num_tokens, both = gate_up.shape
    width, odd = divmod(both, 2)
    if odd or not gate_up.is_contiguous():
        raise ShapeError(f"rows of {both} numbers are no gate and up side by side")
    product = gate_up.new_empty(num_tokens, width)
    columns = min(MAX_COLUMNS, padded(width))
    _SILU_MUL(
        (num_tokens, ceil_div(width, columns), 1),
        product,
        gate_up,
        WIDTH=width,
        COLUMNS=columns,
        num_warps=4,
    )
    return product


@triton.jit
def _silu_mul_kernel(
    product: tl.tensor,
    gate_up: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Gate some columns of one row."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    source = gate_up + token * 2 * WIDTH + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=is_column, other=0.0)
    gated = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(product + token * WIDTH + column, gated.to(up.dtype), mask=is_column)


_SILU_MUL = Launch(_silu_mul_kernel)
