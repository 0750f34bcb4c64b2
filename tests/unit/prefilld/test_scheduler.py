"""The FCFS scheduler with a token budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefilld.scheduler import QueueFullError, Scheduler


@dataclass(eq=False)
class Prompt:
    num_tokens: int
    launched_tokens: int = 0


def always(_prompt: Prompt) -> bool:
    return True


def room_for(num_tokens: int) -> Callable[[Prompt], bool]:
    return lambda prompt: prompt.num_tokens <= num_tokens


def make(**options: int) -> Scheduler[Prompt]:
    return Scheduler(**{"token_budget": 512, "max_waiting": 8, "max_running": 8} | options)


def test_a_prompt_within_the_budget_is_one_chunk() -> None:
    scheduler = make()
    scheduler.add(prompt := Prompt(300))
    assert scheduler.admit(room_for(1_600)) is prompt
    (chunk,) = scheduler.next_step()
    assert (chunk.start, chunk.length, chunk.is_last) == (0, 300, True)


def test_a_long_prompt_is_cut_at_the_budget() -> None:
    scheduler = make()
    scheduler.add(prompt := Prompt(1_200))
    scheduler.admit(always)
    lengths = []
    while prompt.launched_tokens < prompt.num_tokens:
        (chunk,) = scheduler.next_step()
        lengths.append(chunk.length)
        prompt.launched_tokens += chunk.length
    assert lengths == [512, 512, 176]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "expected"),
    [
        (16_000, 0, [4_096, 4_096, 4_096, 2_048, 1_664]),
        (5_000, 0, [3_584, 1_416]),
        (4_000, 0, [2_048, 1_952]),
        (2_048, 0, [2_048]),
        (2_100, 0, [1_024, 1_076]),
        (9_000, 1_040, [4_080, 2_048, 1_832]),
    ],
)
def test_a_prompt_that_is_alone_takes_large_chunks_and_a_small_last_one(
    num_tokens: int, num_cached: int, expected: list[int]
) -> None:
    """Each begins where a whole piece of attention does, also behind a cached beginning."""
    scheduler = make(token_budget=2_048, lone_budget=4_096)
    scheduler.add(prompt := Prompt(num_tokens, num_cached))
    scheduler.admit(always)
    lengths = []
    while prompt.launched_tokens < prompt.num_tokens:
        (chunk,) = scheduler.next_step()
        lengths.append(chunk.length)
        prompt.launched_tokens += chunk.length
    assert lengths == expected


def test_a_prompt_that_is_joined_goes_back_to_the_budget() -> None:
    """Only the chunks that are under way are large; what waits for blocks does not count."""
    scheduler = make(token_budget=2_048, lone_budget=4_096)
    scheduler.add(long := Prompt(100_000))
    scheduler.add(short := Prompt(200))
    scheduler.admit(always)
    assert [chunk.length for chunk in scheduler.next_step()] == [4_096]
    long.launched_tokens += 4_096
    scheduler.admit(always)
    assert [chunk.length for chunk in scheduler.next_step()] == [1_024, 200]
    long.launched_tokens += 1_024
    scheduler.remove(short)
    assert [chunk.length for chunk in scheduler.next_step()] == [4_096]


def test_a_short_prompt_behind_a_long_one_is_done_within_one_step() -> None:
    """The long one may take only half of the budget while somebody runs behind it."""
    scheduler = make()
    scheduler.add(Prompt(100_000))
    scheduler.add(short := Prompt(200))
    scheduler.admit(always)
    scheduler.admit(always)
    first, second = scheduler.next_step()
    assert (first.length, second.request, second.length) == (256, short, 200)


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """A big prompt that waits for blocks must not starve behind small ones."""
    scheduler = make()
    scheduler.add(big := Prompt(1_600))
    scheduler.add(Prompt(16))
    assert scheduler.admit(room_for(1_584)) is None
    assert scheduler.admit(room_for(1_600)) is big


def test_a_full_queue_refuses_and_keeps_its_order() -> None:
    scheduler = make(max_waiting=2)
    scheduler.add(first := Prompt(1))
    scheduler.add(second := Prompt(1))
    with pytest.raises(QueueFullError, match="2 requests are waiting already"):
        scheduler.add(Prompt(1))
    assert scheduler.waiting == (first, second)


def test_removing_is_safe_in_every_state() -> None:
    scheduler = make()
    scheduler.add(running := Prompt(1))
    scheduler.add(waiting := Prompt(1))
    scheduler.admit(always)
    for prompt in (running, waiting, waiting):
        scheduler.remove(prompt)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


@given(
    lengths=st.lists(st.integers(1, 3_000), min_size=1, max_size=12),
    budget=st.integers(1, 600),
    extra=st.sampled_from([0, 1, 100, 1_500]),
    max_running=st.integers(1, 5),
)
def test_every_prompt_is_computed_once_and_in_order(
    lengths: list[int], budget: int, extra: int, max_running: int
) -> None:
    """Chunks stay within the budget, never overlap, and everything ends."""
    lone_budget = budget + extra
    scheduler = make(
        token_budget=budget, lone_budget=lone_budget, max_waiting=12, max_running=max_running
    )
    prompts = [Prompt(length) for length in lengths]
    for prompt in prompts:
        scheduler.add(prompt)
    admitted = []
    for _ in range(sum(lengths) + len(lengths)):
        while (request := scheduler.admit(always)) is not None:
            admitted.append(request)
        chunks = scheduler.next_step()
        if not chunks:
            break
        is_large = len(chunks) == 1 and not chunks[0].is_last
        assert sum(chunk.length for chunk in chunks) <= (lone_budget if is_large else budget)
        for chunk in chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.request.launched_tokens
            chunk.request.launched_tokens += chunk.length
            if chunk.is_last:
                scheduler.remove(chunk.request)
    assert admitted == prompts
    assert all(prompt.launched_tokens == prompt.num_tokens for prompt in prompts)
