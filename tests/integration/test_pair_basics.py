"""The pair as a whole, over a tiny model: answers, sizes, overload, cancels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from protocol.messages import Accepted, End, Tokens
from tests.support.pair import Pair, wait_until, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 16


@pytest.fixture(scope="module", params=["pull", "direct"])
def access(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, access: str) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("p")
    settings = {"pool.access": access}
    with Pair(folder, model=write_tiny_model(folder), settings=settings) as running:
        yield running
        running.wait_settled()


def ids_of(num_tokens: int) -> list[int]:
    return [2 + (7 * index) % 250 for index in range(num_tokens)]


def test_an_answer_is_accepted_then_tokens_then_end(pair: Pair) -> None:
    with pair.client.stream("hello world", raw=True, max_tokens=12, ignore_eos=True) as stream:
        events = list(stream)
    accepted, *tokens, end = events
    assert isinstance(accepted, Accepted)
    assert isinstance(end, End)
    assert accepted.prompt_tokens == end.usage.prompt_tokens > 0
    assert accepted.cached_tokens == 0
    assert end.reason == "length"
    indices, ids = [], []
    for event in tokens:
        assert isinstance(event, Tokens)
        indices.append(event.index)
        assert event.index == len(ids)
        ids += event.ids
    assert len(ids) == end.usage.completion_tokens == 12
    assert end.timings_ms.handoff is not None
    assert end.timings_ms.device is None, "no GPU had a part in it"


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3_000])
def test_prompts_of_every_size_around_a_block_and_far_beyond_the_budget(
    pair: Pair, num_tokens: int
) -> None:
    answer = pair.client.generate(ids_of(num_tokens), max_tokens=20, ignore_eos=True)
    assert len(answer.ids) == 20
    again = pair.client.generate(ids_of(num_tokens), max_tokens=20, ignore_eos=True)
    assert again.ids == answer.ids
    pair.wait_settled()


def test_an_unstreamed_answer_is_one_frame_with_the_same_tokens(pair: Pair) -> None:
    streamed = pair.client.generate("hello", raw=True, max_tokens=9, ignore_eos=True)
    with pair.client.stream(
        "hello", raw=True, max_tokens=9, ignore_eos=True, stream=False
    ) as stream:
        frames = [event for event in stream if isinstance(event, Tokens)]
    (frame,) = frames
    assert (tuple(frame.ids), frame.text) == (streamed.ids, streamed.text)


def test_a_seed_decides_the_answer_whatever_runs_beside_it(pair: Pair) -> None:
    sampling = {"temperature": 1.0, "top_k": 40, "seed": 11}

    def ask(seed: int) -> tuple[int, ...]:
        client = Client(pair.socket, timeout_s=60)
        return client.generate(
            "hello", raw=True, max_tokens=24, ignore_eos=True, sampling=sampling | {"seed": seed}
        ).ids

    alone = ask(11)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [11, *range(7)]))
    assert together[0] == alone
    assert len({tuple(ids) for ids in together}) > 4, "other seeds give other answers"


def test_an_answer_of_one_token_never_leaves_prefilld(pair: Pair) -> None:
    before = pair.counter("prefilld", "kvpair_handoffs_sent_total")
    answer = pair.client.generate(ids_of(40), max_tokens=1, ignore_eos=True)
    assert len(answer.ids) == 1
    assert answer.reason == "length"
    assert pair.counter("prefilld", "kvpair_handoffs_sent_total") == before


def test_a_long_prompt_is_announced_in_chunks_while_it_is_computed(pair: Pair, access: str) -> None:
    """What is read in place needs no announcement."""
    before = pair.counter("prefilld", "kvpair_chunks_announced_total")
    never_asked = ids_of(2_000)[::-1]
    pair.client.generate(never_asked, max_tokens=4, ignore_eos=True)
    assert pair.counter("prefilld", "kvpair_chunks_announced_total") - before == (
        3 if access == "pull" else 0
    )


def test_cancel_ends_the_answer_and_gives_every_block_back(pair: Pair) -> None:
    with pair.client.stream(ids_of(64), max_tokens=2_000, ignore_eos=True) as stream:
        num_tokens = 0
        reason = None
        for event in stream:
            if isinstance(event, Tokens):
                num_tokens += len(event.ids)
                if num_tokens > 5:
                    stream.cancel()
            elif isinstance(event, End):
                reason = event.reason
    assert reason == "cancelled"
    assert 5 < num_tokens < 2_000
    pair.wait_settled()


def test_a_resumed_answer_goes_on_where_it_was_cut(pair: Pair) -> None:
    """Sampling is keyed by seed and position, so no token is lost, doubled or changed."""
    options = {"max_tokens": 30, "ignore_eos": True, "raw": True}
    sampling = {"temperature": 0.9, "seed": 5}
    whole = pair.client.generate("hello world", sampling=sampling, **options)
    with pair.client.stream("hello world", sampling=sampling, **options) as stream:
        accepted = next(stream)
    assert isinstance(accepted, Accepted)
    for num_delivered in (0, 1, 17, 29, 30):
        resume = {
            "attempt": 1,
            "seed": accepted.seed,
            "fingerprint": accepted.fingerprint,
            "ids": whole.ids[:num_delivered],
        }
        rest = pair.client.generate("hello world", sampling=sampling, resume=resume, **options)
        assert rest.ids == whole.ids[num_delivered:], num_delivered
        assert rest.reason == "length"


def test_logs_tie_a_request_together_across_both_daemons(pair: Pair) -> None:
    pair.client.generate("hello", raw=True, max_tokens=4, ignore_eos=True, id="tie-1")

    def events(name: str) -> list[str]:
        return [line["event"] for line in pair.log(name) if line.get("request_id") == "tie-1"]

    wait_until(lambda: "request.ended" in events("decoded"), what="decoded logged the end")
    assert events("prefilld")[:2] == ["request.accepted", "handoff.sent"]
    assert events("decoded")[0] == "handoff.adopted"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"pool.num_blocks": 4 * 8 + 1}, id="prefilld's pool"),
        pytest.param({"decoded.num_blocks": 4 * 9 + 1}, id="decoded's pool"),
        pytest.param({"decoded.max_batch": 4}, id="decoded's batch"),
    ],
)
def test_thirty_two_requests_against_room_for_four_all_complete(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Whoever finds no room waits in order; nothing fails and nothing leaks."""
    with Pair(tmp_path, model=write_tiny_model(tmp_path), settings=sizes) as small:

        def ask(number: int) -> int:
            client = Client(small.socket, timeout_s=120)
            prompt = ids_of(100 + number % 20)
            return len(client.generate(prompt, max_tokens=16, ignore_eos=True).ids)

        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(ask, range(32))) == [16] * 32
        small.wait_settled()
        assert small.counter("decoded", "kvpair_handoffs_adopted_total") == 32
