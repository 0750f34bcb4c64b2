"""Paged attention against plain attention written out, over pools full of NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.ops.attention import SequenceSpan, paged_attention, row_spans
from shared.ops.errors import ShapeError
from shared.ops.kv_write import write_kv

BLOCK_SIZE, HEAD_DIM, NUM_BLOCKS = 4, 8, 40
SCALE = HEAD_DIM**-0.5


class Sequence:
    """A sequence's numbers, and the blocks that hold its context."""

    def __init__(self, *, query_len: int, context_len: int, heads: tuple[int, int]) -> None:
        num_heads, num_kv_heads = heads
        self.query = torch.randn(query_len, num_heads, HEAD_DIM)
        self.key = torch.randn(context_len, num_kv_heads, HEAD_DIM)
        self.value = torch.randn(context_len, num_kv_heads, HEAD_DIM)

    def expected(self, *, window: int = 1_000_000) -> Tensor:
        """Return causal attention in float64, one query and one head at a time."""
        query_len, num_heads, _ = self.query.shape
        context_len, num_kv_heads, _ = self.key.shape
        out = torch.empty(query_len, num_heads, HEAD_DIM, dtype=torch.float64)
        for row in range(query_len):
            visible = context_len - query_len + row + 1
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                first = max(0, visible - window)
                keys = self.key[first:visible, kv_head].double()
                scores = keys @ self.query[row, head].double() / math.sqrt(HEAD_DIM)
                out[row, head] = scores.softmax(-1) @ self.value[first:visible, kv_head].double()
        return out.float()


def place(sequences: list[Sequence]) -> tuple[Tensor, Tensor, list[SequenceSpan]]:
    """Write contexts into scattered blocks of a NaN pool; return queries, pool and spans."""
    num_kv_heads = sequences[0].key.shape[1]
    pool = torch.full((NUM_BLOCKS, 2, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), float("nan"))
    free = torch.randperm(NUM_BLOCKS).tolist()
    spans: list[SequenceSpan] = []
    start = 0
    for sequence in sequences:
        context_len = sequence.key.shape[0]
        table = torch.tensor([free.pop() for _ in range(-(-context_len // BLOCK_SIZE))])
        position = torch.arange(context_len)
        slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        write_kv(pool[:, 1], sequence.key, sequence.value, slots)
        query_len = sequence.query.shape[0]
        spans.append(
            SequenceSpan(
                query_start=start, query_len=query_len, context_len=context_len, block_table=table
            )
        )
        start += query_len
    return torch.cat([sequence.query for sequence in sequences]), pool[:, 1], spans


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["own", "shared", "one"])
@pytest.mark.parametrize(
    ("query_len", "context_len"),
    [(1, 1), (1, 3), (1, 4), (1, 5), (1, 23), (2, 2), (4, 4), (9, 9), (3, 10), (5, 8), (7, 29)],
)
def test_attention_equals_the_written_out_definition(
    query_len: int, context_len: int, heads: tuple[int, int]
) -> None:
    """Every border of a block, a whole prompt, a later chunk and a decoded token, NaN behind."""
    torch.manual_seed(1)
    sequence = Sequence(query_len=query_len, context_len=context_len, heads=heads)
    query, kv_layer, spans = place([sequence])
    attended = paged_attention(query, kv_layer, spans, scale=SCALE)
    torch.testing.assert_close(attended, sequence.expected(), rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    """The numbers are the same bit for bit alone and in a mixed batch."""
    torch.manual_seed(2)
    shapes = [(1, 7), (5, 5), (1, 16), (3, 20)]
    sequences = [Sequence(query_len=q, context_len=c, heads=(6, 2)) for q, c in shapes]
    query, kv_layer, spans = place(sequences)
    together = paged_attention(query, kv_layer, spans, scale=SCALE)
    for span in spans:
        rows = slice(span.query_start, span.query_start + span.query_len)
        alone = SequenceSpan(
            query_start=0,
            query_len=span.query_len,
            context_len=span.context_len,
            block_table=span.block_table,
        )
        by_itself = paged_attention(query[rows], kv_layer, [alone], scale=SCALE)
        assert torch.equal(together[rows], by_itself)


def test_more_queries_than_context_are_refused() -> None:
    """A query is itself part of its context."""
    with pytest.raises(ShapeError, match="3 queries cannot end a context of 2"):
        SequenceSpan(query_start=0, query_len=3, context_len=2, block_table=torch.tensor([1]))


def test_a_block_table_of_the_wrong_length_is_refused() -> None:
    """One block too few would end in the wrong context, silently."""
    query, kv_layer, _ = place([Sequence(query_len=1, context_len=9, heads=(2, 2))])
    span = SequenceSpan(query_start=0, query_len=1, context_len=9, block_table=torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="2 blocks of 4 do not fit a context of 9"):
        paged_attention(query, kv_layer, [span], scale=SCALE)


def test_spans_must_tile_the_rows() -> None:
    """A row that no sequence claims would be left as garbage."""
    query, kv_layer, spans = place([Sequence(query_len=2, context_len=2, heads=(2, 2))])
    with pytest.raises(ShapeError, match="have 2 rows, the queries 3"):
        paged_attention(torch.cat([query, query[:1]]), kv_layer, spans, scale=SCALE)
    with pytest.raises(ShapeError, match="starts at row 0, expected 2"):
        paged_attention(query, kv_layer, [*spans, *spans], scale=SCALE)


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    """Three query heads cannot share two KV heads evenly."""
    _, kv_layer, spans = place([Sequence(query_len=1, context_len=1, heads=(2, 2))])
    with pytest.raises(ShapeError, match="3 query heads cannot share 2"):
        paged_attention(torch.zeros(1, 3, HEAD_DIM), kv_layer, spans, scale=SCALE)


def test_single_rows_of_a_step_attend_as_they_did_in_it() -> None:
    """The last layer attends with the wanted rows alone, wherever in a chunk they stand."""
    torch.manual_seed(3)
    sequences = [
        Sequence(query_len=query_len, context_len=context_len, heads=(6, 2))
        for query_len, context_len in ((5, 5), (1, 7), (6, 15))
    ]
    query, kv_layer, spans = place(sequences)
    rows = (1, 4, 5, 8, 11)
    alone = list(row_spans(spans, rows, block_size=BLOCK_SIZE))
    attended = paged_attention(query[list(rows)], kv_layer, alone, scale=SCALE)
    whole = paged_attention(query, kv_layer, spans, scale=SCALE)
    torch.testing.assert_close(attended, whole[list(rows)], rtol=1e-5, atol=1e-5)


# --- a sliding window ------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 4, 5, 13, 100])
@pytest.mark.parametrize(("query_len", "context_len"), [(1, 14), (5, 14), (14, 14), (3, 3)])
def test_a_query_sees_the_tokens_of_its_window(
    query_len: int, context_len: int, window: int
) -> None:
    """Itself included, as in transformers; blocks before the first are not even read."""
    torch.manual_seed(window)
    sequence = Sequence(query_len=query_len, context_len=context_len, heads=(6, 2))
    expected = sequence.expected(window=window)
    query, kv_layer, (span,) = place([sequence])
    kv_layer[span.block_table[: max(0, context_len - query_len + 1 - window) // BLOCK_SIZE]] = (
        float("nan")
    )
    windowed = replace(span, window=window)
    attended = paged_attention(query, kv_layer, [windowed], scale=SCALE)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
