"""Daemons that are stopped for ten seconds in the middle of their work, and wake up."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.even_model import write_even_model
from tests.support.link_peers import load_host
from tests.support.pair import Pair, wait_until
from tests.support.solo import SoloEngine
from tests.support.stops import (
    STOP_SETTINGS,
    check_sleeping_decoded,
    check_sleeping_prefilld,
    prompt_of,
    stop_in_mid_answer,
)
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_LAYERS = 24
"""Enough that copying a prompt takes a while: 24 KiB a token."""
MAX_TRIES = 5

RUNNING = [Ask(prompt=prompt_of(30, 10 * n), max_tokens=100) for n in range(4)]
LONG = [Ask(prompt=prompt_of(480, 100 + n), max_tokens=12) for n in range(8)]
"""Computed in one step and so handed over at once: 92 MB to copy, between steps of the others."""
IN_PLACE = [Ask(prompt=prompt_of(80, 50 + n), max_tokens=100) for n in range(8)]
"""Read where prefilld computed them for as long as they are answered."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of many layers."""
    return write_even_model(tmp_path_factory.mktemp("deep"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def engine(model: Path, _one_torch_thread: None) -> SoloEngine:
    return SoloEngine(load_host(model))


@pytest.fixture(scope="module", params=["pull", "direct"])
def access(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path, access: str) -> Iterator[Pair]:
    """Prompts in one chunk and none of it cached: all of it is copied behind its HANDOFF."""
    settings = {
        **STOP_SETTINGS,
        "pool.prefix_cache": False,
        "pool.access": access,
        "prefilld.token_budget": 4096,
        "pool.num_blocks": 300,
        "decoded.num_blocks": 600,
    }
    with Pair(tmp_path_factory.mktemp("s"), model=model, settings=settings) as running:
        yield running


def num_unpulled(pair: Pair) -> int:
    """Return how many requests decoded had adopted and not pulled, as of its last log line."""
    events = [line["event"] for line in pair.log("decoded")]
    return events.count("handoff.adopted") - events.count("lease.pulled")


def stop_in_mid_copy(pair: Pair) -> WatchedStreams:
    """Ask for the long prompts and stop decoded while it copies them; return their streams."""
    for _ in range(MAX_TRIES):
        streams = WatchedStreams(pair.socket, LONG)
        wait_until(
            lambda: pair.decoded_status()["sequences"]["waiting"] > 0,
            timeout_s=30,
            what="decoded has adopted a prompt and is copying it",
        )
        pair.signal("decoded", signal.SIGSTOP)
        if num_unpulled(pair) > 0:
            return streams
        pair.signal("decoded", signal.SIGCONT)
        with streams:
            streams.results()
    raise AssertionError(f"decoded copied faster than it could be stopped, {MAX_TRIES} times")


def test_a_decoded_that_sleeps_over_its_leases_uses_none_of_their_blocks(
    pair: Pair, engine: SoloEngine, access: str
) -> None:
    """What it copied or read is void; nobody sees more than a pause."""
    if access == "pull":
        check_sleeping_decoded(pair, engine, running=RUNNING, late=LONG, stop=stop_in_mid_copy)
        return
    check_sleeping_decoded(
        pair,
        engine,
        running=RUNNING,
        late=IN_PLACE,
        stop=lambda pair: stop_in_mid_answer(pair, IN_PLACE),
    )


def test_a_prefilld_that_sleeps_holds_up_only_what_it_computes(
    pair: Pair, engine: SoloEngine
) -> None:
    check_sleeping_prefilld(pair, engine, running=RUNNING, late=LONG)
