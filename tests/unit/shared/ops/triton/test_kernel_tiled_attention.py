"""Attention by tiles in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.ops.tile_checks import Prompts, check_tiled_attention

CHUNKS = ((1, 0), (70, 0), (5, 37), (130, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunks_of_several_prompts(dtype: torch.dtype) -> None:
    """One token, several tiles, and what was computed before; NaN behind and between."""
    check_tiled_attention(Prompts(chunks=CHUNKS, dtype=dtype), "cpu")


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(3, 3, 24, 5), (7, 1, 80, 32)]
)
def test_odd_shapes(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Heads and blocks that are no power of two."""
    case = Prompts(
        chunks=CHUNKS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    check_tiled_attention(case, "cpu")


@pytest.mark.parametrize("window", [1, 20, 1_000])
def test_within_a_window(window: int) -> None:
    """Of some rows the first keys of a tile are none."""
    check_tiled_attention(Prompts(chunks=CHUNKS, window=window), "cpu")
