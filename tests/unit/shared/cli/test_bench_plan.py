"""`shared.cli.bench_plan`: the same work from the same seed, and prompts that nobody shares."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from shared.cli.bench_plan import MAX_CONCURRENCY, Ask, Load, Span, asks_of
from shared.cli.bench_stream import prompt_of

LOAD = Load(
    num_requests=400,
    concurrency=4,
    rate=None,
    prompt_tokens=Span(low=20, high=40),
    answer_tokens=Span(low=5, high=5),
    num_shared_tokens=0,
    seed=3,
)
VOCAB_SIZE = 2000


def prompts(asks: list[Ask]) -> list[tuple[int, ...]]:
    return [tuple(prompt_of(ask, VOCAB_SIZE)) for ask in asks]


def test_lengths_take_every_value_of_their_range() -> None:
    asks = asks_of(LOAD, prompt_seed=1)
    assert {ask.num_prompt_tokens for ask in asks} == set(range(20, 41))
    assert {ask.num_tokens for ask in asks} == {5}
    assert {ask.start_s for ask in asks} == {0.0}
    assert [len(prompt) for prompt in prompts(asks)] == [ask.num_prompt_tokens for ask in asks]


def test_the_seed_decides_the_work_and_not_the_prompts() -> None:
    """Two runs compare, and the second finds nothing of the first in the prefix cache."""
    load = replace(LOAD, rate=50.0)
    first, second = asks_of(load, prompt_seed=1), asks_of(load, prompt_seed=10**12)
    work = [
        [(a.num_prompt_tokens, a.num_tokens, a.start_s) for a in asks] for asks in (first, second)
    ]
    assert work[0] == work[1]
    assert not set(prompts(first)) & set(prompts(second))
    other = asks_of(replace(load, seed=4), prompt_seed=1)
    assert [ask.start_s for ask in other] != [ask.start_s for ask in first]


def test_no_two_prompts_begin_alike() -> None:
    """Not in one run, nor in its warm-up: a block that begins alike would be found."""
    asks = asks_of(LOAD, prompt_seed=1)
    asks += asks_of(LOAD, prompt_seed=1, first_number=LOAD.num_requests)
    assert len({prompt[:16] for prompt in prompts(asks)}) == 2 * LOAD.num_requests


def test_a_shared_prefix_is_all_that_is_shared() -> None:
    """The warm-up has it as well, so that every measured request may find it."""
    load = replace(LOAD, num_shared_tokens=15)
    asks = asks_of(load, prompt_seed=1) + asks_of(load, prompt_seed=1, first_number=400)
    assert len({prompt[:15] for prompt in prompts(asks)}) == 1
    assert len({prompt[15:20] for prompt in prompts(asks)}) == len(asks)
    assert [len(prompt) for prompt in prompts(asks)] == [ask.num_prompt_tokens for ask in asks]


@pytest.mark.parametrize("vocab_size", [2, 250, 49_152])
def test_prompts_are_of_the_vocabulary(vocab_size: int) -> None:
    """Without its first ids, which are special, as far as it has others."""
    ids = prompt_of(Ask(num_prompt_tokens=5000, num_tokens=1, seed=7), vocab_size)
    assert min(ids) >= min(300, vocab_size // 2)
    assert max(ids) < vocab_size


def test_a_rate_is_kept_and_its_moments_are_random() -> None:
    """As a Poisson process: gaps are exponential, so their spread is their mean."""
    asks = asks_of(replace(LOAD, rate=20.0, num_requests=4000), prompt_seed=1)
    starts_s = [ask.start_s for ask in asks]
    assert starts_s == sorted(starts_s)
    assert starts_s[-1] == pytest.approx(4000 / 20)
    gaps_s = [later - earlier for earlier, later in pairwise(starts_s)]
    assert statistics.mean(gaps_s) == pytest.approx(1 / 20, rel=0.01)
    assert statistics.pstdev(gaps_s) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.median(gaps_s) == pytest.approx(math.log(2) / 20, rel=0.1)


@pytest.mark.parametrize(
    ("concurrency", "num_requests", "most"),
    [(4, 400, 4), (8, 3, 3), (None, 100, 100), (None, 10_000, MAX_CONCURRENCY)],
)
def test_no_more_run_at_once_than_there_are(
    concurrency: int | None, num_requests: int, most: int
) -> None:
    load = replace(LOAD, concurrency=concurrency, num_requests=num_requests, rate=1.0)
    assert load.max_at_once == most


def test_a_span_is_told_as_it_was_asked_for() -> None:
    assert str(Span(low=5, high=5)) == "5"
    assert str(Span(low=1000, high=2000)) == "1,000 to 2,000"
