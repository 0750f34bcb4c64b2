"""The embedded model on GPUs against the CPU: pair and one process, pulled and in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.engine.local import LocalEngine
from tests.support.gpus import pair_devices
from tests.support.margin_rule import GreedyReference
from tests.support.smollm2_answers import (
    MAX_BFLOAT16_ERROR,
    MAX_BFLOAT16_FLIPS,
    check_one_process,
    check_pair,
    engine_on,
    exact_references,
    rounding_errors,
)

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def references() -> list[GreedyReference]:
    return exact_references()


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return engine_on(pair_devices()[0], "float32")


def test_one_process_answers_as_on_the_cpu(
    engine: LocalEngine, references: list[GreedyReference]
) -> None:
    check_one_process(engine, references)


@pytest.mark.parametrize("access", ["pull", "direct"])
def test_the_pair_answers_as_one_process_on_the_cpu(
    tmp_path: Path, engine: LocalEngine, references: list[GreedyReference], access: str
) -> None:
    """In float32, where only a choice between two that are as good may differ."""
    check_pair(tmp_path, pair_devices(), access, references, engine)


def test_bfloat16_errs_by_its_roundings(
    engine: LocalEngine, references: list[GreedyReference]
) -> None:
    found = rounding_errors(engine_on(pair_devices()[0], "bfloat16"), engine, references)
    print(f"\n{found}")
    assert found.max_error < MAX_BFLOAT16_ERROR
    assert found.flips < MAX_BFLOAT16_FLIPS
