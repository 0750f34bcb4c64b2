"""The real pair with direct access on the memfd: the same answers, and prefilld may die."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from shared.model.loader import load_model
from tests.support.pair import Pair, wait_until, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from protocol.client import Answer


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Pair]:
    with Pair(
        tmp_path_factory.mktemp("d"), model=model_file, settings={"pool.access": "direct"}
    ) as running:
        yield running


def prompt(num_tokens: int) -> list[int]:
    return [2 + (7 * index) % 250 for index in range(num_tokens)]


def expected(model_file: Path, ids: list[int], *, max_tokens: int) -> list[int]:
    loaded = load_model(str(model_file), "float32")
    engine = LocalEngine(Llama(loaded.spec, loaded.tensors), num_blocks=200)
    return engine.generate([ids], max_tokens=max_tokens, ignore_eos=True)[0]


def test_status_says_why(pair: Pair) -> None:
    link = pair.decoded_status()["link"]
    assert (link["access"], link["access_because"]) == ("direct", "pool.access says so")
    assert pair.status()["link"]["access"] == "direct"


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 1000])
def test_answers_are_those_of_one_process(pair: Pair, model_file: Path, num_tokens: int) -> None:
    """Of the prompt only a partly filled block was copied."""
    before = pair.counter("decoded", "kvpair_pulled_bytes_total")
    answer = pair.client.generate(prompt(num_tokens), max_tokens=40, ignore_eos=True)
    assert list(answer.ids) == expected(model_file, prompt(num_tokens), max_tokens=40)
    pair.wait_settled()
    pulled = pair.counter("decoded", "kvpair_pulled_bytes_total") - before
    block_bytes = pair.status()["pool"]["block_bytes"]
    assert pulled == (num_tokens % 16 > 0) * block_bytes


def test_running_answers_survive_prefilld(pair: Pair, model_file: Path) -> None:
    """What they read is moved to decoded's pool, and a new prefilld serves beside them."""
    ids = prompt(500)
    answers: list[Answer] = []
    client = threading.Thread(
        target=lambda: answers.append(pair.client.generate(ids, max_tokens=1500, ignore_eos=True))
    )
    client.start()
    wait_until(lambda: pair.decoded_status()["sequences"]["running"], what="it is decoded")
    pair.kill("prefilld")
    pair.restart("prefilld")
    assert pair.client.generate(ids, max_tokens=3, ignore_eos=True).ids
    client.join(120)
    assert list(answers[0].ids) == expected(model_file, ids, max_tokens=1500)
    pair.wait_settled()
