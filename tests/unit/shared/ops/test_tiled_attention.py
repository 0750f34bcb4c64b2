"""Attention by tiles against attention by sequences."""

from __future__ import annotations

import pytest
import torch

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.errors import ShapeError
from shared.ops.tiled_attention import tiled_attention


def pool_and_query(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 2, 2, 4, 8), torch.randn(num_rows, 4, 8)


@pytest.mark.parametrize("window", [None, 3])
def test_a_cut_sequence_attends_as_a_whole_one(window: int | None) -> None:
    """Each tile sees what lies before it, of its own sequence."""
    pool, query = pool_and_query(9)
    tables = [torch.tensor([5, 1, 3]), torch.tensor([2])]
    spans = [
        SequenceSpan(
            query_start=start,
            query_len=length,
            context_len=context,
            block_table=table,
            window=window,
        )
        for start, length, context, table in ((0, 6, 10, tables[0]), (6, 3, 3, tables[1]))
    ]
    expected = paged_attention(query, pool, spans, scale=0.5)
    # (row, rows, position, entry), in any order, padding anywhere.
    tiles = torch.tensor([(6, 3, 0, 3), (0, 0, 0, 0), (0, 4, 4, 0), (4, 2, 8, 0)])
    out = tiled_attention(query, pool, tiles, torch.cat(tables), scale=0.5, window=window)
    torch.testing.assert_close(out, expected)


def test_what_does_not_fit_is_refused() -> None:
    """An op would read beside its tensors."""
    pool, query = pool_and_query(3)
    tiles, table = torch.tensor([(0, 3, 0, 0)]), torch.tensor([1])
    with pytest.raises(ShapeError, match="4 query heads of 8 cannot share 3 KV heads of 8"):
        tiled_attention(query, torch.zeros(6, 2, 3, 4, 8), tiles, table, scale=1.0)
    with pytest.raises(ShapeError, match=r"\[1, 3\] numbers are no tiles"):
        tiled_attention(query, pool, tiles[:, :3], table, scale=1.0)
    with pytest.raises(ShapeError, match="must be contiguous"):
        tiled_attention(torch.zeros(4, 3, 8).transpose(0, 1), pool, tiles, table, scale=1.0)
