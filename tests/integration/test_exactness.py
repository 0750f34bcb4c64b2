"""One process that does both halves, held against transformers on the same weights.

Every pool is full of NaN at first, so a number that was never written shows in any result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from tests.support.margin_rule import MAX_LOGIT_DIFFERENCE
from tests.support.transformers_reference import teacher_forced_logits

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from shared.model.loader import LoadedModel
    from tests.integration.conftest import GreedyReferences

pytestmark = [pytest.mark.model, pytest.mark.slow]

BLOCK_SIZE = 16
NUM_BLOCKS = 400
NUM_TOKENS = 64
NUM_QUESTIONS = 20


@pytest.fixture(scope="module")
def model(smollm2: LoadedModel) -> Llama:
    """Our forward pass over the embedded model."""
    return Llama(smollm2.spec, dict(smollm2.tensors))


def new_engine(model: Llama, *, token_budget: int = 512) -> LocalEngine:
    return LocalEngine(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        token_budget=token_budget,
        fill=float("nan"),
    )


@pytest.mark.parametrize("question", range(NUM_QUESTIONS))
def test_greedy_answers_equal_those_of_transformers(
    model: Llama, greedy_references: GreedyReferences, question: int
) -> None:
    """One request alone, its prompt in chunks of 48 tokens."""
    engine = new_engine(model, token_budget=48)
    reference = greedy_references[question]
    (ids,) = engine.generate([reference.prompt_ids], max_tokens=NUM_TOKENS, ignore_eos=True)
    reference.check(ids, engine.prompt_logits)


def test_a_batch_of_eight_answers_as_each_alone(
    model: Llama, greedy_references: GreedyReferences
) -> None:
    """Products over more rows add in another order; the rule of margins says how much it may."""
    engine = new_engine(model)
    references = [greedy_references[question] for question in range(8)]
    answers = engine.generate(
        [reference.prompt_ids for reference in references], max_tokens=NUM_TOKENS, ignore_eos=True
    )
    for reference, ids in zip(references, answers, strict=True):
        reference.check(ids, engine.prompt_logits)


@pytest.mark.parametrize("question", range(NUM_QUESTIONS))
def test_logits_of_whole_prompts_equal_those_of_transformers(
    model: Llama,
    smollm2_reference: LlamaForCausalLM,
    question_prompts: list[list[int]],
    question: int,
) -> None:
    """At every position, not only the last."""
    prompt = question_prompts[question]
    expected = teacher_forced_logits(smollm2_reference, prompt)
    difference = float((new_engine(model).prompt_logits(prompt) - expected).abs().max())
    assert difference <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_prompts_around_a_blocks_border(
    model: Llama, smollm2: LoadedModel, smollm2_reference: LlamaForCausalLM, num_tokens: int
) -> None:
    """The last block is empty but for one token, full but for one, or just full."""
    prompt = smollm2.tokenizer.encode("The history of the town begins at a ford. " * 3)[:num_tokens]
    assert len(prompt) == num_tokens
    expected = teacher_forced_logits(smollm2_reference, prompt)
    for token_budget in (512, 5):
        logits = new_engine(model, token_budget=token_budget).prompt_logits(prompt)
        assert float((logits - expected).abs().max()) <= MAX_LOGIT_DIFFERENCE


def test_a_long_prompt_does_not_depend_on_its_chunks(
    model: Llama, smollm2: LoadedModel, smollm2_reference: LlamaForCausalLM
) -> None:
    """3,000 tokens in two large chunks, and in ten whose borders lie inside blocks."""
    text = " ".join(f"On day {day} the river stood {day * 7 % 90} cm high." for day in range(400))
    prompt = smollm2.tokenizer.encode(text)[:3000]
    assert len(prompt) == 3000
    expected = teacher_forced_logits(smollm2_reference, prompt)
    for token_budget in (2048, 333):
        logits = new_engine(model, token_budget=token_budget).prompt_logits(prompt)
        assert torch.isfinite(logits).all()
        assert float((logits - expected).abs().max()) <= MAX_LOGIT_DIFFERENCE
