"""The largest of each row, by many thread blocks a row and a second launch that joins them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shared.ops.errors import ShapeError
from shared.ops.triton.launch import Launch, ceil_div, padded

TILE = 2048
"""Numbers of a thread block: 16 a thread."""


def argmax(x: Tensor) -> Tensor:
    """Return the index of each row's largest number, the lowest of several.

    Args:
        x: [num_rows, width] float32, contiguous, with no NaN.

    Returns:
        [num_rows] int64.

    Raises:
        ShapeError: `x` is not as above.

    Enqueues on the current stream and returns at once.
    """
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ShapeError(f"{[*x.shape]} {x.dtype} is no contiguous float32")
    num_rows, width = x.shape
    num_tiles = ceil_div(width, TILE)
    largest = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=x.device)
    places = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=x.device)
    chosen = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    _LARGEST_OF_TILE((num_rows, num_tiles, 1), largest, places, x, width, num_warps=4, TILE=TILE)
    _LARGEST_OF_ROW(
        (num_rows, 1, 1),
        chosen,
        largest,
        places,
        num_tiles,
        TILES=padded(num_tiles),
        num_warps=1,
    )
    return chosen


@triton.jit(do_not_specialize=["width"])
def _largest_of_tile_kernel(
    largest: tl.tensor,
    places: tl.tensor,
    x: tl.tensor,
    width: tl.tensor,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Find the largest of one tile of one row."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    place = tile * TILE + tl.arange(0, TILE)
    numbers = tl.load(x + row * width + place, mask=place < width, other=float("-inf"))
    top = tl.max(numbers, 0)
    tl.store(largest + row * num_tiles + tile, top)
    first = tl.min(tl.where((numbers == top) & (place < width), place, width - 1), 0)
    tl.store(places + row * num_tiles + tile, first)


@triton.jit(do_not_specialize=["num_tiles"])
def _largest_of_row_kernel(
    chosen: tl.tensor,
    largest: tl.tensor,
    places: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Find the largest of one row's tiles."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    numbers = tl.load(largest + row * num_tiles + tile, mask=is_tile, other=float("-inf"))
    place = tl.load(places + row * num_tiles + tile, mask=is_tile, other=2147483647)
    is_top = is_tile & (numbers == tl.max(numbers, 0))
    tl.store(chosen + row, tl.min(tl.where(is_top, place, 2147483647), 0).to(tl.int64))


_LARGEST_OF_TILE = Launch(_largest_of_tile_kernel)
_LARGEST_OF_ROW = Launch(_largest_of_row_kernel)
