"""Both daemons killed again and again under eight streams: every answer is the one it would be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.kills import Recovery, asks_of, check_kills
from tests.support.pair import Pair
from tests.support.solo import SoloEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_SEEDS, NUM_ROUNDS = 2, 5
"""Over both ways of access in all 20 kills of each daemon."""
NUM_TOKENS = 150


@pytest.fixture(scope="module", params=["pull", "direct"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, even_model: Path
) -> Iterator[Pair]:
    """Chunks of 64 tokens, so that kills also fall between two of them."""
    settings = {
        "prefilld.token_budget": 64,
        "log.level": "info",
        "pool.access": request.param,
    }
    with Pair(tmp_path_factory.mktemp("k"), model=even_model, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def recovery(request: pytest.FixtureRequest) -> Iterator[Recovery]:
    """What the tests of this file measure; told at their end."""
    measured = Recovery()
    yield measured
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if measured.stalls_s and capture is not None:
        with capture.global_and_fixture_disabled():
            print(measured.report(), file=sys.stderr)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_kills_of_either_daemon_change_no_answer(
    pair: Pair, solo_engine: SoloEngine, recovery: Recovery, seed: int
) -> None:
    """At random moments between the first and the last of the tokens."""
    check_kills(
        pair, solo_engine, recovery, seed=seed, num_rounds=NUM_ROUNDS, asks=asks_of(NUM_TOKENS)
    )
