"""The pair over its sockets, held against transformers on the same weights, by the margin rule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from tests.support.margin_rule import GreedyReference
from tests.support.pair import Pair
from tests.support.questions import first_questions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from shared.model.loader import LoadedModel
    from tests.integration.conftest import GreedyReferences

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_QUESTIONS = 20
NUM_TOKENS = 64
BLOCK_SIZE = 16
TOKEN_BUDGET = 48


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The embedded model; chunks of 48 tokens, so that most prompts are announced on the way."""
    folder = tmp_path_factory.mktemp("x")
    with Pair(
        folder,
        model="smollm2-135m-instruct",
        settings={
            "prefilld.token_budget": TOKEN_BUDGET,
            "pool.num_blocks": 512,
            "decoded.num_blocks": 512,
        },
    ) as running:
        yield running
        running.wait_settled()


@pytest.fixture(scope="module")
def logits_of(smollm2: LoadedModel) -> Callable[[list[int]], Tensor]:
    """Logits behind given ids, from one process: compared where a choice was close."""
    engine = LocalEngine(
        Llama(smollm2.spec, dict(smollm2.tensors)), num_blocks=400, block_size=16, token_budget=512
    )
    return engine.prompt_logits


@pytest.mark.parametrize("question", range(NUM_QUESTIONS))
def test_greedy_answers_to_chat_questions_equal_those_of_transformers(
    pair: Pair,
    greedy_references: GreedyReferences,
    logits_of: Callable[[list[int]], Tensor],
    question: int,
) -> None:
    """One daemon applies the chat template and computes in chunks; the other pulls and goes on."""
    _, questions = first_questions(NUM_QUESTIONS)
    reference = greedy_references[question]
    before = pair.counter("prefilld", "kvpair_chunks_announced_total")
    answer = pair.client.generate(questions[question], max_tokens=NUM_TOKENS, ignore_eos=True)
    assert answer.usage.prompt_tokens == len(reference.prompt_ids)
    reference.check(answer.ids, logits_of)
    num_chunks = pair.counter("prefilld", "kvpair_chunks_announced_total") - before
    cached_tokens = answer.usage.cached_tokens  # the system prompt, announced by itself
    computed_tokens = len(reference.prompt_ids) - cached_tokens
    assert num_chunks == (cached_tokens > 0) + (computed_tokens - 1) // TOKEN_BUDGET


def test_eight_at_once_answer_as_each_alone(
    pair: Pair,
    greedy_references: GreedyReferences,
    logits_of: Callable[[list[int]], Tensor],
) -> None:
    references = [greedy_references[question] for question in range(8)]

    def ask(reference: GreedyReference) -> tuple[int, ...]:
        client = Client(pair.socket, timeout_s=300)
        ids = list(reference.prompt_ids)
        return client.generate(ids, max_tokens=NUM_TOKENS, ignore_eos=True).ids

    with ThreadPoolExecutor(len(references)) as pool:
        answers = list(pool.map(ask, references))
    for reference, ids in zip(references, answers, strict=True):
        reference.check(ids, logits_of)


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3_000])
def test_prompts_around_a_block_and_long_ones(
    pair: Pair,
    smollm2: LoadedModel,
    smollm2_reference: LlamaForCausalLM,
    logits_of: Callable[[list[int]], Tensor],
    num_tokens: int,
) -> None:
    text = " ".join(f"On day {day} the river stood {day * 7 % 90} cm high." for day in range(400))
    prompt = smollm2.tokenizer.encode(text)[:num_tokens]
    assert len(prompt) == num_tokens
    reference = GreedyReference.compute(smollm2_reference, prompt, num_tokens=8)
    answer = pair.client.generate(prompt, max_tokens=8, ignore_eos=True)
    reference.check(answer.ids, logits_of)
