"""The reference of decode attention against attention over spans, which has its own tests."""

from __future__ import annotations

import pytest
import torch

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.decode_attention import decode_attention
from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair, peer_entries

LENGTHS, BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, NUM_HEADS = (9, 0, 4, 1, 12), 4, 8, 2, 6
SCALE = HEAD_DIM**-0.5


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_both_attentions_agree_over_two_pools_of_nan(window: int | None) -> None:
    """Each table names both pools; spans see one pool that holds the blocks of both."""
    torch.manual_seed(0)
    shape = (16, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    joined = torch.full(shape, float("nan"))
    free = (torch.randperm(15) + 1).tolist()
    tables = torch.full((len(LENGTHS), 4), 99, dtype=torch.int32)
    spans, rows = [], [row for row, length in enumerate(LENGTHS) if length]
    query = torch.randn(len(LENGTHS), NUM_HEADS, HEAD_DIM)
    for row, length in enumerate(LENGTHS):
        ids = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        for index, block in enumerate(ids):
            end = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
            joined[block, 1, :, :, :end] = torch.randn(2, NUM_KV_HEADS, end, HEAD_DIM)
            entry = torch.tensor(block, dtype=torch.int32)
            tables[row, index] = peer_entries(entry) if block % 2 else entry
        if length:
            table = torch.tensor(ids)
            spans.append(
                SequenceSpan(
                    query_start=len(spans),
                    query_len=1,
                    context_len=length,
                    block_table=table,
                    window=window,
                )
            )
    own, peer = joined.clone(), joined.clone()
    own[1::2], peer[0::2] = float("nan"), float("nan")
    attended = decode_attention(
        query,
        PoolPair.of(own, peer),
        tables,
        torch.tensor(LENGTHS, dtype=torch.int32),
        layer=1,
        scale=SCALE,
        window=window,
    )
    expected = paged_attention(query[rows], joined[:, 1], spans, scale=SCALE)
    torch.testing.assert_close(attended[rows], expected, rtol=1e-5, atol=1e-5)
    assert not attended[1].any()


def test_tables_of_the_wrong_type_are_refused() -> None:
    """The kernels read 32 bits an entry."""
    pools = PoolPair.of(torch.zeros(2, 1, 2, 1, BLOCK_SIZE, HEAD_DIM))
    lengths = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ShapeError, match="block_tables must be int32 with 1 rows"):
        decode_attention(
            torch.zeros(1, 1, HEAD_DIM), pools, torch.tensor([[1]]), lengths, layer=0, scale=1.0
        )
