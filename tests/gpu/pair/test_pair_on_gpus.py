"""The real pair on one or two GPUs: its answers are those of one process on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from protocol.client import Client
from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from shared.model.loader import load_model
from tests.support.pair import Pair, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_TOKENS = 40


def devices() -> tuple[str, str]:
    """Return prefilld's GPU and decoded's: two where there are two."""
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_file: str) -> Iterator[Pair]:
    prefilld, decoded = devices()
    with Pair(
        tmp_path_factory.mktemp("g"),
        model=model_file,
        settings={
            "prefilld.device": prefilld,
            "decoded.device": decoded,
            "prefilld.token_budget": 64,
            "pool.num_blocks": 400,
            "decoded.num_blocks": 400,
            "decoded.max_batch": 16,
            "pool.access": "pull",
        },
        start_timeout_s=200,
    ) as running:
        yield running
        running.wait_settled()


def prompt(number: int, num_tokens: int) -> list[int]:
    return [2 + (7 * index + 13 * number) % 250 for index in range(num_tokens)]


LENGTHS = (1, 15, 16, 17, 40, 64, 65, 128, 200, 333)


def test_answers_are_those_of_one_process_on_the_cpu(pair: Pair, model_file: str) -> None:
    """One after the other, and all at once."""
    loaded = load_model(model_file, "float32")
    engine = LocalEngine(Llama(loaded.spec, loaded.tensors), num_blocks=100, block_size=16)
    prompts = [prompt(number, length) for number, length in enumerate(LENGTHS)]
    expected = [
        engine.generate([ids], max_tokens=MAX_TOKENS, ignore_eos=True)[0] for ids in prompts
    ]

    def ask(ids: list[int]) -> list[int]:
        client = Client(pair.socket, timeout_s=60)
        return list(client.generate(ids, max_tokens=MAX_TOKENS, ignore_eos=True).ids)

    assert [ask(ids) for ids in prompts] == expected
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == expected
    pair.wait_settled()


def test_prompts_that_begin_alike_are_answered_as_by_one_process(
    pair: Pair, model_file: str
) -> None:
    """What one prompt left in the pool is read by the next ones, two of them at once."""
    loaded = load_model(model_file, "float32")
    engine = LocalEngine(Llama(loaded.spec, loaded.tensors), num_blocks=100, block_size=16)
    document = prompt(50, 300)
    prompts = [[*document, *prompt(60 + number, 30)] for number in range(3)]
    expected = [
        engine.generate([ids], max_tokens=MAX_TOKENS, ignore_eos=True)[0] for ids in prompts
    ]

    def ask(ids: list[int]) -> tuple[list[int], int]:
        client = Client(pair.socket, timeout_s=60)
        answer = client.generate(ids, max_tokens=MAX_TOKENS, ignore_eos=True)
        return list(answer.ids), answer.usage.cached_tokens

    assert ask(prompts[0]) == (expected[0], 0)
    with ThreadPoolExecutor(2) as pool:
        later = list(pool.map(ask, prompts[1:]))
    assert later == [(ids, 300 // 16 * 16) for ids in expected[1:]]
    pair.wait_settled()


def test_each_stage_of_a_hand_over_is_timed_by_the_gpus(pair: Pair) -> None:
    """Steps on both GPUs follow one another, and no copy took longer than the host saw it run."""
    request_id = "timed"
    client = Client(pair.socket, timeout_s=60)
    answer = client.generate(prompt(70, 200), max_tokens=8, ignore_eos=True, id=request_id)
    device = answer.timings_ms.device
    assert device is not None
    assert device.prefill is not None
    assert device.pull is not None
    assert device.last_pull is not None
    assert device.first_step is not None
    assert min(device.prefill, device.first_step, device.last_pull) > 0
    assert device.last_pull <= device.pull
    slack_ms = 0.02 * answer.timings_ms.total  # two clocks
    assert device.prefill + device.first_step <= answer.timings_ms.total + slack_ms
    pair.wait_settled()
    (measured,) = [line for line in pair.log("decoded") if is_of(line, request_id, "measured")]
    assert measured["device_pull_us"] == pytest.approx(device.pull * 1000, abs=1)
    pulls = [
        line
        for line in pair.log("decoded")
        if line["event"] == "chunk.pulled" and line["lease_id"] == measured["lease_id"]
    ]
    assert len(pulls) > 1, "chunks are pulled while others are computed"
    for line in pulls:
        host_us = (line["done_ns"] - line["start_ns"]) / 1000
        assert 0 < line["device_us"] <= host_us * 1.02 + 20
    for line in pair.log("prefilld"):
        if is_of(line, request_id, "chunk.computed"):
            assert 0 < line["written_us"] <= line["device_us"]


def is_of(line: dict[str, Any], request_id: str, event: str) -> bool:
    return line.get("request_id") == request_id and str(line["event"]).endswith(event)
