"""What attention by tiles must show, on whatever runs it: a GPU, or the interpreter on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.kv_write import write_kv
from shared.ops.tiled_attention import TILE_ROWS
from shared.ops.triton.tiled_attention import TilePlan, tiled_attention
from tests.gpu.ops.kernel_checks import MAX_ERROR, relative_error

NUM_PADDING_TILES = 2


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Chunks of prompts: (tokens, tokens before them) of each."""

    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    num_padding_rows: int = 3


@dataclass(frozen=True, eq=False)
class TiledInputs:
    """Arguments for the kernel; `spans` say the same to `paged_attention`."""

    query: Tensor
    kv_layer: Tensor
    tiles: Tensor
    block_table: Tensor
    spans: list[SequenceSpan]


def tiled_inputs(case: Prompts, device: str) -> TiledInputs:
    """Scatter random contexts over a pool of NaN, and list their tiles with padding between."""
    shape = (1, 2, case.num_kv_heads, case.block_size, case.head_dim)
    needed = [-(-(length + before) // case.block_size) for length, before in case.chunks]
    num_blocks = sum(needed) + 1
    pool = torch.full((num_blocks, *shape), float("nan"), dtype=case.dtype, device=device)
    tables = torch.randperm(num_blocks, device=device)[:-1].split(needed)
    spans: list[SequenceSpan] = []
    tiles = [(0, 0, 0, 0)] * NUM_PADDING_TILES
    start = first_entry = 0
    for (length, before), table in zip(case.chunks, tables, strict=True):
        context_len = length + before
        position = torch.arange(context_len, device=device)
        slots = table[position // case.block_size] * case.block_size + position % case.block_size
        numbers = torch.randn(2, context_len, case.num_kv_heads, case.head_dim)
        numbers[1] += torch.arange(case.num_kv_heads).view(-1, 1)  # each head its own level
        write_kv(pool[:, 0], *numbers.to(pool), slots)
        spans.append(
            SequenceSpan(
                query_start=start,
                query_len=length,
                context_len=context_len,
                block_table=table,
                window=case.window,
            )
        )
        tiles += [
            (start + row, min(TILE_ROWS, length - row), before + row, first_entry)
            for row in range(0, length, TILE_ROWS)
        ]
        start += length
        first_entry += len(table)
    tiles += [(0, 0, 0, 0)] * NUM_PADDING_TILES
    query = torch.randn(start + case.num_padding_rows, case.num_heads, case.head_dim)
    return TiledInputs(
        query=query.to(pool),
        kv_layer=pool[:, 0],
        tiles=torch.tensor(tiles, device=device),
        block_table=torch.cat([*tables, torch.full((5,), 1 << 40, device=device)]),
        spans=spans,
    )


def check_tiled_attention(case: Prompts, device: str, plan: TilePlan | None = None) -> None:
    """Attention by tiles is each sequence's, up to rounding; of rows that pad it is 0."""
    torch.manual_seed(0)
    inputs = tiled_inputs(case, device)
    scale = case.head_dim**-0.5
    out = tiled_attention(
        inputs.query,
        inputs.kv_layer,
        inputs.tiles,
        inputs.block_table,
        scale=scale,
        window=case.window,
        plan=plan,
    )
    num_rows = sum(length for length, _ in case.chunks)
    expected = paged_attention(
        inputs.query[:num_rows].double(), inputs.kv_layer.double(), inputs.spans, scale=scale
    )
    assert out.shape == inputs.query.shape
    assert relative_error(out[:num_rows], expected) < MAX_ERROR[case.dtype]
    assert not out[num_rows:].any(), "what pads goes on through the layers: as numbers"
