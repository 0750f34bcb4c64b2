"""Attention by tiles on a GPU: in every type, of every shape, inside a graph."""

from __future__ import annotations

import pytest
import torch

from shared.ops.triton.tiled_attention import tiled_attention
from tests.gpu.ops.tile_checks import Prompts, check_tiled_attention, tiled_inputs

pytestmark = pytest.mark.gpu

CHUNKS = ((1, 0), (512, 0), (5, 1_700), (130, 9), (200, 3_000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_chunks_of_several_prompts(head_dim: int, dtype: torch.dtype) -> None:
    """One token, several tiles, and what was computed before; NaN behind and between."""
    check_tiled_attention(Prompts(chunks=CHUNKS, head_dim=head_dim, dtype=dtype), "cuda")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (9, 3), (7, 1), (4, 4)])
def test_any_group_of_heads(num_heads: int, num_kv_heads: int) -> None:
    """Of the 8B shape, of SmolLM2, of Qwen2, and without groups."""
    case = Prompts(
        chunks=CHUNKS, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=torch.bfloat16
    )
    check_tiled_attention(case, "cuda")


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_blocks_of_any_size(block_size: int) -> None:
    """A load is part of a block or covers many."""
    check_tiled_attention(
        Prompts(chunks=CHUNKS, block_size=block_size, dtype=torch.bfloat16), "cuda"
    )


@pytest.mark.parametrize("window", [1, 100, 5_000])
def test_within_a_window(window: int) -> None:
    """Of some rows the first keys of a tile are none."""
    check_tiled_attention(Prompts(chunks=CHUNKS, window=window, dtype=torch.bfloat16), "cuda")


def test_a_captured_launch_follows_its_tiles() -> None:
    """Other prompts, other blocks, another number of live tiles, without a new capture."""
    torch.manual_seed(0)
    cases = [
        Prompts(chunks=chunks, head_dim=128, dtype=torch.bfloat16)
        for chunks in (CHUNKS, ((300, 700), (1, 2_000)), CHUNKS[1:3])
    ]
    every = [tiled_inputs(case, "cuda") for case in cases]
    first = every[0]
    query, tiles, table = first.query.clone(), first.tiles.clone(), first.block_table.clone()
    kv_layer = first.kv_layer
    tiled_attention(query, kv_layer, tiles, table, scale=0.1)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tiled_attention(query, kv_layer, tiles, table, scale=0.1)
    for inputs in every:
        num_rows, num_tiles = len(inputs.query), len(inputs.tiles)
        num_entries = len(inputs.block_table)
        kv_layer[: len(inputs.kv_layer)].copy_(inputs.kv_layer.clone())
        query[:num_rows], tiles[:num_tiles], tiles[num_tiles:] = inputs.query, inputs.tiles, 0
        table[:num_entries] = inputs.block_table
        graph.replay()
        expected = tiled_attention(
            inputs.query, kv_layer, inputs.tiles, inputs.block_table, scale=0.1
        )
        live = sum(span.query_len for span in inputs.spans)
        assert torch.equal(out[:live], expected[:live])
