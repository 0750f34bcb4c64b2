"""The prefix cache of a real pair: what is found is used, and no answer shows that it was."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from protocol.messages import Accepted, End, Sampling
from shared.engine.local import LocalEngine
from shared.ops.sampling import SamplingParams
from tests.support.margin_rule import check_repeated
from tests.support.pair import Pair
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shared.daemon.model_host import ModelHost
    from tests.support.watched_streams import Delivered

BLOCK = 16
NUM_BLOCKS = 128
NUM_TOKENS = 40

SAMPLINGS = [Sampling(seed=0), Sampling(temperature=0.9, seed=7)]


@pytest.fixture(scope="module", params=["pull", "direct"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Pair]:
    """Room for 127 blocks; chunks of 64 tokens, so that most prompts take several.

    Where decoded reads in place, whoever shares a block shares it until both answers end.
    """
    settings = {
        "pool.num_blocks": NUM_BLOCKS,
        "pool.access": request.param,
        "prefilld.token_budget": 64,
    }
    with Pair(tmp_path_factory.mktemp("c"), model=tiny_model, settings=settings) as running:
        yield running
        running.wait_settled()


@pytest.fixture
def check(tiny_host: ModelHost) -> Callable[[Ask, Sequence[int]], None]:
    """Fail unless an answer is the one of a single process that keeps no cache."""
    engine = LocalEngine(tiny_host.model, num_blocks=NUM_BLOCKS, token_budget=64)

    def check_answer(ask: Ask, ids: Sequence[int]) -> None:
        sampling = SamplingParams(temperature=ask.sampling.temperature, seed=ask.sampling.seed or 0)
        (solo,) = engine.generate(
            [list(ask.prompt)], max_tokens=ask.max_tokens, sampling=sampling, ignore_eos=True
        )
        check_repeated(
            ids,
            solo,
            prompt_ids=ask.prompt,
            sampling=sampling,
            logits_of=engine.prompt_logits,
        )

    return check_answer


_salts = itertools.count(1)


def new_prompt(num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that no other begins like."""
    salt = next(_salts)
    return tuple(2 + (7 * index * salt + salt) % 250 for index in range(num_tokens))


def ask_pair(pair: Pair, ask: Ask) -> tuple[Accepted, End, list[int]]:
    """Return how a request was accepted, how it ended, and its answer."""
    accepted: list[Accepted] = []
    ends: list[End] = []
    ids: list[int] = []
    client = Client(pair.socket, timeout_s=60)
    with client.stream(
        list(ask.prompt), max_tokens=ask.max_tokens, ignore_eos=True, sampling=ask.sampling
    ) as stream:
        for event in stream:
            match event:
                case Accepted():
                    accepted.append(event)
                case End():
                    ends.append(event)
                case _:
                    ids += event.ids
    return accepted[0], ends[0], ids


def cache_use(pair: Pair) -> dict[str, int]:
    use: dict[str, int] = pair.status()["prefix_cache"]
    return use


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", [BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 300])
def test_a_prompt_that_was_computed_before_is_answered_as_the_first_time(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None], num_tokens: int, sampling: Sampling
) -> None:
    """All of its whole blocks are found but for the one with its last token."""
    ask = Ask(prompt=new_prompt(num_tokens), max_tokens=NUM_TOKENS, sampling=sampling)
    num_found = (num_tokens - 1) // BLOCK * BLOCK
    for expected in (0, num_found, num_found):
        accepted, end, ids = ask_pair(pair, ask)
        assert accepted.cached_tokens == end.usage.cached_tokens == expected
        assert end.usage.prompt_tokens == num_tokens
        check(ask, ids)


def test_what_is_found_is_not_computed_again(pair: Pair) -> None:
    prompt = new_prompt(300)
    ask_pair(pair, Ask(prompt=prompt, max_tokens=2))
    before = cache_use(pair)
    computed = pair.counter("prefilld", "kvpair_prompt_tokens_total")
    ask_pair(pair, Ask(prompt=prompt, max_tokens=2))
    after = cache_use(pair)
    assert after["hit_tokens"] - before["hit_tokens"] == 288
    assert after["missed_tokens"] - before["missed_tokens"] == 12
    assert pair.counter("prefilld", "kvpair_prompt_tokens_total") - computed == 12
    assert pair.counter("prefilld", "kvpair_prefix_cache_hit_tokens_total") == after["hit_tokens"]


def test_the_second_turn_of_a_conversation_computes_what_is_new(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    """The answer lies in decoded's pool, so it is computed with the new question."""
    document = new_prompt(500)
    first = Ask(prompt=document, max_tokens=NUM_TOKENS)
    _, _, answer = ask_pair(pair, first)
    second = Ask(prompt=(*document, *answer, *new_prompt(20)), max_tokens=NUM_TOKENS)
    _, end, ids = ask_pair(pair, second)
    assert end.usage.cached_tokens == 500 // BLOCK * BLOCK
    check(second, ids)


def check_all(
    asks: Sequence[Ask],
    results: Sequence[Delivered],
    check: Callable[[Ask, Sequence[int]], None],
) -> None:
    for ask, delivered in zip(asks, results, strict=True):
        assert delivered.end is not None
        check(ask, delivered.ids)


def asks_alike(num_asks: int, *, common_tokens: int, max_tokens: int) -> list[Ask]:
    """Return requests whose prompts have a beginning in common, which is in the cache of none."""
    common = new_prompt(common_tokens)
    return [
        Ask(
            prompt=(*common, *new_prompt(10 + index)),
            max_tokens=max_tokens,
            sampling=SAMPLINGS[index % 2],
        )
        for index in range(num_asks)
    ]


def test_many_requests_share_one_beginning_at_once(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    """Together they have twice as many blocks as the pool, and run side by side all the same."""
    asks = asks_alike(9, common_tokens=30 * BLOCK, max_tokens=NUM_TOKENS)
    ask_pair(pair, asks.pop())
    with WatchedStreams(pair.socket, asks) as streams:
        results = streams.results()
    check_all(asks, results, check)
    assert {
        delivered.end.usage.cached_tokens for delivered in results if delivered.end is not None
    } == {30 * BLOCK}
    pair.wait_settled()


def test_the_least_recently_used_make_room_when_the_pool_is_full(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    """Twice as many prompts as fit, in turn: each answer is right, and none waits for ever."""
    asks = [Ask(prompt=new_prompt(30 * BLOCK), max_tokens=8) for _ in range(8)]
    before = cache_use(pair)
    for ask in asks:
        _, end, ids = ask_pair(pair, ask)
        assert end.usage.cached_tokens == 0
        check(ask, ids)
    pair.wait_settled()
    use, pool = cache_use(pair), pair.status()["pool"]
    assert use["evicted_blocks"] - before["evicted_blocks"] >= 8 * 30 - NUM_BLOCKS
    assert use["blocks"] == pool["cached"] > NUM_BLOCKS - 30
    for ask, expected in ((asks[-1], 29 * BLOCK), (asks[0], 0)):
        _, end, ids = ask_pair(pair, ask)
        assert end.usage.cached_tokens == expected
        check(ask, ids)


def test_requests_under_pressure_and_at_once_are_answered_as_each_alone(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    """Blocks are shared, evicted and written anew while leases on others are open."""
    asks = [
        ask
        for _ in range(4)
        for ask in asks_alike(4, common_tokens=20 * BLOCK + 5, max_tokens=NUM_TOKENS)
    ]
    asks = asks[::4] + asks[1::4] + asks[2::4] + asks[3::4]
    evicted = cache_use(pair)["evicted_blocks"]
    with WatchedStreams(pair.socket, asks) as streams:
        results = streams.results()
    check_all(asks, results, check)
    pair.wait_settled()
    assert cache_use(pair)["evicted_blocks"] > evicted


def test_an_answer_that_broke_off_is_resumed_from_the_cache(
    pair: Pair, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    """Also where several shared a beginning that decoded held a lease on when it died."""
    asks = asks_alike(4, common_tokens=10 * BLOCK, max_tokens=400)
    with WatchedStreams(pair.socket, asks) as streams:
        streams.wait_for_tokens(400)
        before = cache_use(pair)["hit_tokens"]
        pair.kill("decoded")
        pair.start("decoded")
        results = streams.results()
    check_all(asks, results, check)
    resumed = [delivered for delivered in results if delivered.losses]
    assert resumed, "decoded died too late"
    assert cache_use(pair)["hit_tokens"] - before >= len(resumed) * 10 * BLOCK
    pair.wait_serving()
    pair.wait_settled()


def test_switched_off_nothing_is_found_or_kept(
    tmp_path: Path, tiny_model: Path, check: Callable[[Ask, Sequence[int]], None]
) -> None:
    settings = {"pool.prefix_cache": False}
    with Pair(tmp_path, model=tiny_model, settings=settings) as pair:
        ask = Ask(prompt=new_prompt(100), max_tokens=NUM_TOKENS)
        for _ in range(2):
            accepted, end, ids = ask_pair(pair, ask)
            assert accepted.cached_tokens == end.usage.cached_tokens == 0
            check(ask, ids)
        pair.wait_settled()
        pool = pair.status()["pool"]
        assert (pool["cached"], pool["free"]) == (0, pool["total"] - 1)
        assert cache_use(pair) == {
            "hit_tokens": 0,
            "missed_tokens": 0,
            "evicted_blocks": 0,
            "blocks": 0,
        }
