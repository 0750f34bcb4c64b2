"""Rows of the decode buffers: dense, and nobody moves without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.decode_rows import DecodeRows


def test_a_sequence_keeps_its_row_while_it_runs() -> None:
    rows = DecodeRows(4)
    assert rows.plan(["a", "b"]).previous_rows == [None, None]
    plan = rows.plan(["a", "b"])
    assert (plan.rows, plan.previous_rows) == ([0, 1], [0, 1])


def test_the_last_row_moves_into_a_hole() -> None:
    """So that n sequences have rows 0 to n - 1; where its token lies is told."""
    rows = DecodeRows(4)
    rows.plan(["a", "b", "c"])
    plan = rows.plan(["b", "c"])
    assert (plan.rows, plan.previous_rows) == ([1, 0], [1, 2])
    plan = rows.plan(["b", "c"])
    assert (plan.rows, plan.previous_rows) == ([1, 0], [1, 0])


def test_who_joins_takes_the_row_of_who_left() -> None:
    rows = DecodeRows(2)
    rows.plan(["a", "b"])
    plan = rows.plan(["b", "c"])
    assert (plan.rows, plan.previous_rows) == ([1, 0], [1, None])


def test_more_sequences_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences do not fit 2 rows"):
        DecodeRows(2).plan(["a", "b", "c"])


def test_a_sequence_named_twice_is_refused() -> None:
    """Two rows would write the same slots."""
    with pytest.raises(ValueError, match="named twice"):
        DecodeRows(2).plan(["a", "a"])


@given(st.lists(st.sets(st.integers(0, 7), max_size=5), max_size=20))
def test_rows_are_dense_and_distinct_and_their_past_is_true(batches: list[set[int]]) -> None:
    """Whoever joins and leaves: the token of a sequence is looked for where it was left."""
    rows = DecodeRows(5)
    last: dict[int, int] = {}
    for batch in batches:
        keys = sorted(batch)
        plan = rows.plan(keys)
        assert sorted(plan.rows) == list(range(len(keys)))
        assert plan.previous_rows == [last.get(key) for key in keys]
        stayed = [key for key in keys if key in last and last[key] < len(keys)]
        assert all(plan.rows[keys.index(key)] == last[key] for key in stayed)
        last = dict(zip(keys, plan.rows, strict=True))
