"""What people rely on every day, on GPUs; the checks are those of the tests on the CPU.

Answers are held against one process on the CPU.  Pulled across two GPUs where there are two; read
in place on one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from protocol.messages import Sampling
from tests.support.everyday import (
    check_death_of_decoded,
    check_death_of_prefilld,
    check_sampling,
    check_second_turn,
)
from tests.support.gpus import pair_devices
from tests.support.kills import Recovery, asks_of, check_kills
from tests.support.pair import Pair
from tests.support.stops import (
    STOP_SETTINGS,
    check_sleeping_decoded,
    check_sleeping_prefilld,
    prompt_of,
    stop_in_mid_answer,
    stop_in_mid_prompt,
)
from tests.support.watched_streams import Ask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.solo import SoloEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_ROUNDS = 4
NUM_TOKENS = 600
"""Of a killed stream's answer: a few tenths of a second."""

STREAMS = [
    Ask(
        prompt=prompt_of(100 + 130 * n, 10 * n),
        max_tokens=2 * NUM_TOKENS,
        sampling=Sampling(temperature=0.9 * (n % 2), seed=n),
    )
    for n in range(4)
]
IN_PLACE = [Ask(prompt=prompt_of(80, 50 + n), max_tokens=NUM_TOKENS) for n in range(8)]


def long_asks(salt: int) -> list[Ask]:
    """Return prompts that nobody asked before, of eight chunks each: they share the steps."""
    return [Ask(prompt=prompt_of(480, salt + n), max_tokens=12) for n in range(8)]


@pytest.fixture(scope="module", params=["pull", "direct"])
def access(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path, access: str) -> Iterator[Pair]:
    first, second = pair_devices()
    settings = {
        **STOP_SETTINGS,
        "prefilld.device": first,
        "decoded.device": second if access == "pull" else first,
        "prefilld.token_budget": 64,
        "pool.access": access,
        "pool.num_blocks": 400,
        "decoded.num_blocks": 1200,
        "decoded.max_batch": 16,
    }
    with Pair(
        tmp_path_factory.mktemp("e"), model=model, settings=settings, start_timeout_s=200
    ) as running:
        yield running


def test_sampled_answers_are_those_of_one_process(pair: Pair, engine: SoloEngine) -> None:
    """With penalties and a bias, in a batch, and resumed."""
    check_sampling(pair, engine)


def test_a_second_turn_is_answered_from_the_prefix_cache(pair: Pair, engine: SoloEngine) -> None:
    check_second_turn(pair, engine)


def test_a_decoded_that_sleeps_over_its_leases_uses_none_of_their_blocks(
    pair: Pair, engine: SoloEngine, access: str
) -> None:
    """They are others' when it wakes up: chunks that it was to pull, prompts that it reads."""
    is_pulled = access == "pull"
    late, stop = (
        (long_asks(100), stop_in_mid_prompt) if is_pulled else (IN_PLACE, stop_in_mid_answer)
    )
    check_sleeping_decoded(
        pair,
        engine,
        running=STREAMS,
        late=late,
        stop=lambda pair: stop(pair, late),
        loses_adopted=not is_pulled,
    )


def test_a_prefilld_that_sleeps_holds_up_only_what_it_computes(
    pair: Pair, engine: SoloEngine
) -> None:
    check_sleeping_prefilld(pair, engine, running=STREAMS, late=long_asks(120))


def test_deaths_of_either_daemon_change_no_answer(
    request: pytest.FixtureRequest, pair: Pair, engine: SoloEngine, access: str
) -> None:
    """Pulled: eight streams, and four kills of each at any moment.  In place: one of each.

    Streams that read in place move to decoded's own pool when prefilld dies.
    """
    if access == "direct":
        check_death_of_prefilld(pair, engine, STREAMS)
        check_death_of_decoded(pair, engine, STREAMS)
        return
    recovery = Recovery()
    check_kills(pair, engine, recovery, asks=asks_of(NUM_TOKENS), seed=3, num_rounds=NUM_ROUNDS)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        with capture.global_and_fixture_disabled():
            print(recovery.report(), file=sys.stderr)
