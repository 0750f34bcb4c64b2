"""Gaps between tokens beside prompts and alone, however the two can meet."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.cli.bench_figures import figures_of
from shared.cli.bench_plan import Slo
from tests.support.heard import heard

MOMENTS = st.integers(0, 30)
PREFILLS = st.tuples(st.integers(1, 30), st.integers(0, 12))
"""When a prompt's first token was known, and how long before that its computation had begun."""


@given(
    streams=st.lists(
        st.lists(MOMENTS, min_size=2, max_size=8, unique=True).map(sorted), min_size=1
    ),
    prefills=st.lists(PREFILLS, max_size=6),
)
def test_a_gap_is_beside_a_prompt_where_the_two_have_time_in_common(
    streams: list[list[int]], prefills: list[tuple[int, int]]
) -> None:
    """However computations touch, overlap or contain each other; no gap is lost or told twice."""
    answers = [heard(tokens_ms) for tokens_ms in streams]
    prompts = [heard([90], known_ms=known, prefill_ms=took) for known, took in prefills]
    figures = figures_of([*answers, *prompts], Slo())
    gaps = [gap for tokens_ms in streams for gap in pairwise(tokens_ms[1:])]
    beside = [
        later - earlier
        for earlier, later in gaps
        if any(known - took < later and earlier < known for known, took in prefills)
    ]
    num_beside, num_alone = (
        0 if spread is None else spread.num
        for spread in (figures.itl_beside_prompts, figures.itl_alone)
    )
    assert (num_beside, num_alone) == (len(beside), len(gaps) - len(beside))
    if figures.itl_beside_prompts is not None:
        assert round(figures.itl_beside_prompts.mean * num_beside, 6) == sum(beside)
