"""Launches by position: what a compiled kernel would silently mix up is refused."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from shared.ops.triton.launch import Launch, ceil_div, padded


@triton.jit
def _fill_kernel(
    out: tl.tensor,
    number: tl.tensor,
    SIZE: tl.constexpr,
    SHIFT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    tl.store(out + tl.arange(0, SIZE), number + SHIFT)


def test_constants_are_named_in_the_kernel_s_order() -> None:
    """By name Triton takes any order; the second launch of a kind goes by position."""
    fill, out = Launch(_fill_kernel), torch.zeros(4, dtype=torch.int32)
    fill((1, 1, 1), out, 7, num_warps=1, SIZE=4, SHIFT=1)
    assert out.tolist() == [8, 8, 8, 8]
    with pytest.raises(TypeError, match=r"\['SHIFT', 'SIZE'\] are not the kernel's"):
        fill((1, 1, 1), out, 7, num_warps=1, SHIFT=1, SIZE=4)
    with pytest.raises(TypeError, match="are not the kernel's"):
        fill((1, 1, 1), out, num_warps=1, SIZE=4, SHIFT=1)


def test_sizes_are_rounded_up() -> None:
    """Grids cover everything; ranges are powers of two."""
    assert [ceil_div(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [padded(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
