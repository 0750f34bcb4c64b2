"""Many random requests against pools for three: right answers, true counts, and nothing left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.pair import Pair
from tests.support.soak_run import SoakRun, soak_settings
from tests.support.solo import SoloEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = {"pull": 20_261_129, "direct": 20_261_130}
NUM_REQUESTS, NUM_WARMUP = 500, 100

GROWTH_BYTES = 4 << 20
"""Between two moments of one heap; 400 requests that each left 16 kB would be beyond it."""


@pytest.fixture(scope="module", params=SEEDS)
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    even_model: Path,
    solo_engine: SoloEngine,
) -> Iterator[SoakRun]:
    """The requests of one seed, carried out; each test looks at it from another side."""
    access = request.param
    with Pair(
        tmp_path_factory.mktemp("s"), model=even_model, settings=soak_settings(access)
    ) as pair:
        yield SoakRun(
            pair, solo_engine, seed=SEEDS[access], num_requests=NUM_REQUESTS, num_warmup=NUM_WARMUP
        )


def test_each_answer_is_the_one_that_its_request_gets_alone(run: SoakRun) -> None:
    """Also what was delivered of those that were cancelled."""
    run.check_answers()


def test_daemons_count_the_endings_that_clients_saw(run: SoakRun) -> None:
    run.check_counts()


def test_logs_tell_each_ending_once(run: SoakRun) -> None:
    run.check_logs()


def test_nothing_is_left_in_use(run: SoakRun) -> None:
    run.check_nothing_is_left()


def test_memory_descriptors_and_threads_stay_as_they_were(run: SoakRun) -> None:
    run.check_flat(growth_bytes=GROWTH_BYTES)


def test_the_pools_were_crowded_and_clients_left_in_every_way(run: SoakRun) -> None:
    run.check_pressure()
