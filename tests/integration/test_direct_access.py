"""The real pair with direct access on the memfd: the same answers, and prefilld may die."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.everyday import check_death_of_prefilld
from tests.support.pair import Pair
from tests.support.solo import SoloEngine
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, even_model: Path) -> Iterator[Pair]:
    with Pair(
        tmp_path_factory.mktemp("d"), model=even_model, settings={"pool.access": "direct"}
    ) as running:
        yield running


def prompt(num_tokens: int) -> list[int]:
    return [2 + (7 * index) % 250 for index in range(num_tokens)]


def test_status_says_why(pair: Pair) -> None:
    link = pair.decoded_status()["link"]
    assert (link["access"], link["access_because"]) == ("direct", "pool.access says so")
    assert pair.status()["link"]["access"] == "direct"


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 1000])
def test_answers_are_those_of_one_process(
    pair: Pair, solo_engine: SoloEngine, num_tokens: int
) -> None:
    """Of the prompt only a partly filled block was copied."""
    before = pair.counter("decoded", "kvpair_pulled_bytes_total")
    ask = Ask(prompt=tuple(prompt(num_tokens)), max_tokens=40)
    with WatchedStreams(pair.socket, [ask]) as streams:
        solo_engine.check_delivered([ask], streams.results())
    pair.wait_settled()
    pulled = pair.counter("decoded", "kvpair_pulled_bytes_total") - before
    block_bytes = pair.status()["pool"]["block_bytes"]
    assert pulled == (num_tokens % 16 > 0) * block_bytes


def test_running_answers_survive_prefilld(pair: Pair, solo_engine: SoloEngine) -> None:
    """What they read is moved to decoded's pool, and a new prefilld serves beside them."""
    check_death_of_prefilld(pair, solo_engine, [Ask(prompt=tuple(prompt(500)), max_tokens=1500)])


def test_what_fits_only_in_place_is_taken_before_there_is_a_link(
    tmp_path: Path, even_model: Path, solo_engine: SoloEngine
) -> None:
    """Decoded's pool holds the answer and not the prompt, which clients are not to know."""
    settings = {"pool.access": "direct", "decoded.num_blocks": 6}
    pair = Pair(tmp_path, model=even_model, settings=settings)
    ask = Ask(prompt=tuple(prompt(200)), max_tokens=40)
    with pair.alone("prefilld"), WatchedStreams(pair.socket, [ask]) as streams:
        streams.wait_for_tokens(1)
        pair.start("decoded")
        solo_engine.check_delivered([ask], streams.results())
