"""The soak on GPUs: fewer requests than on the CPU, and the GPUs' memory is watched as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.gpus import pair_devices
from tests.support.pair import Pair
from tests.support.soak_run import SoakRun, soak_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.solo import SoloEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_REQUESTS, NUM_WARMUP = 160, 60

GROWTH_BYTES = 8 << 20
GPU_GROWTH_BYTES = 4 << 20
"""Two of the driver's 2 MiB pieces; a pool or a graph that is left would be more."""


@pytest.fixture(scope="module", params=["pull", "direct"])
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    engine: SoloEngine,
) -> Iterator[SoakRun]:
    first, second = pair_devices()
    devices = (first, second if request.param == "pull" else first)
    settings = {
        **soak_settings(request.param),
        "prefilld.device": devices[0],
        "decoded.device": devices[1],
        "decoded.max_batch": 16,
    }
    with Pair(
        tmp_path_factory.mktemp("s"), model=model, settings=settings, start_timeout_s=200
    ) as pair:
        yield SoakRun(
            pair,
            engine,
            seed=11,
            num_requests=NUM_REQUESTS,
            num_warmup=NUM_WARMUP,
            devices=devices,
        )


def test_each_answer_is_the_one_that_its_request_gets_alone(run: SoakRun) -> None:
    """From one process on the CPU."""
    run.check_answers()


def test_daemons_count_and_log_the_endings_that_clients_saw(run: SoakRun) -> None:
    run.check_counts()
    run.check_logs()


def test_nothing_is_left_in_use(run: SoakRun) -> None:
    run.check_nothing_is_left()


def test_memory_descriptors_and_threads_stay_as_they_were(run: SoakRun) -> None:
    run.check_flat(growth_bytes=GROWTH_BYTES, gpu_growth_bytes=GPU_GROWTH_BYTES)
