"""From logits to tokens, with everything that may come between."""

from __future__ import annotations

import pytest
import torch

from shared.engine.batch import SequenceStep
from shared.engine.choosing import choose_tokens, is_plain
from shared.engine.history import TokenHistory
from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from shared.ops.logprobs import TokenLogprob
from shared.ops.sampling import SamplingParams
from shared.ops.token_bitmap import pack_tokens
from tests.support.tiny_llama import random_tensors, tiny_spec

VOCAB_SIZE = 30


def step(
    params: SamplingParams, *, history: TokenHistory | None = None, num_logprobs: int | None = None
) -> SequenceStep:
    if history is None:
        history = TokenHistory.needed_for(params, num_logprobs=num_logprobs)
    return SequenceStep(
        token_ids=(1,),
        start_position=4,
        block_table=(1,),
        sampling=params,
        history=history,
    )


def told_of(choice: SequenceStep) -> list[TokenLogprob]:
    return [] if choice.history is None else list(choice.history.logprobs)


def test_only_a_row_that_asks_is_told_of_probabilities_and_before_any_penalty() -> None:
    """They are the model's own: a bias of -100 makes a token rare, not unlikely."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE)
    best = int(logits[1].argmax())
    params = SamplingParams(logit_bias=((best, -100.0),))
    steps = [
        step(SamplingParams(temperature=1.0)),
        step(params, num_logprobs=2),
        step(SamplingParams(), num_logprobs=0),
    ]
    chosen = choose_tokens(logits.clone(), steps)
    assert chosen.told is not None
    chosen.told.settle()
    (told,), (plain,) = told_of(steps[1]), told_of(steps[2])
    assert told_of(steps[0]) == []
    assert int(chosen.token_ids[1]) != best
    assert [token_id for token_id, _ in told.top] == logits[1].topk(2).indices.tolist()
    own = logits[1].log_softmax(-1)
    assert told.logprob == pytest.approx(float(own[chosen.token_ids[1]]), abs=1e-5)
    assert plain.top == ()


def test_a_penalty_takes_effect_from_the_token_after() -> None:
    """Each chosen token is noted, so the next one knows of it."""
    params = SamplingParams(presence_penalty=100.0)
    history = TokenHistory(params)
    logits = torch.linspace(0, 1, VOCAB_SIZE).unsqueeze(0)
    chosen = [int(choose_tokens(logits.clone(), [step(params, history=history)]).token_ids[0])]
    for _ in range(3):
        result = choose_tokens(logits.clone(), [step(params, history=history)])
        chosen.append(int(result.token_ids[0]))
    assert chosen == [VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4]


def test_a_greedy_row_without_wishes_is_plain() -> None:
    """Such rows never see logits."""
    params = SamplingParams(min_tokens=1)
    assert is_plain(step(SamplingParams()))
    assert not is_plain(step(SamplingParams(temperature=1.0)))
    assert not is_plain(step(SamplingParams(), num_logprobs=0))
    assert not is_plain(step(params))


def test_more_probabilities_than_tokens_are_as_many_as_there_are() -> None:
    asking = step(SamplingParams(), num_logprobs=20)
    chosen = choose_tokens(torch.zeros(1, 3), [asking])
    assert chosen.told is not None
    chosen.told.settle()
    assert [len(told.top) for told in told_of(asking)] == [3]


PENALISED = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=4),
    SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.4, seed=5),
    SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((5, 2.0), (6, -100.0)), seed=6),
    SamplingParams(),
]


def test_penalised_answers_are_the_same_alone_and_in_a_batch() -> None:
    """A request's history is its own."""
    spec = tiny_spec()
    model = Llama(spec, random_tensors(spec))
    prompts = [[1, 5, 9], [1, 6], [1, 7, 7, 7], [1, 8], [1, 3]]
    engine = LocalEngine(model, num_blocks=64)
    together = engine.generate(prompts, max_tokens=24, sampling=PENALISED, ignore_eos=True)
    for prompt, params, answer in zip(prompts, PENALISED, together, strict=True):
        (alone,) = engine.generate([prompt], max_tokens=24, sampling=params, ignore_eos=True)
        assert alone == answer


def test_a_penalised_greedy_answer_is_that_of_transformers() -> None:
    """Their `generate` with the same settings, token for token."""
    from tests.support.transformers_reference import llama_for_causal_lm

    spec = tiny_spec()
    tensors = random_tensors(spec)
    reference = llama_for_causal_lm(spec, dict(tensors))
    prompt = [1, 5, 9, 5]
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=30,
            repetition_penalty=1.4,
            sequence_bias=[[[11], 1.5], [[12], -4.0]],
            pad_token_id=0,
        )
    params = SamplingParams(repetition_penalty=1.4, logit_bias=((11, 1.5), (12, -4.0)))
    engine = LocalEngine(Llama(spec, tensors), num_blocks=16)
    (ours,) = engine.generate([prompt], max_tokens=30, sampling=params, ignore_eos=True)
    assert ours == output[0, len(prompt) :].tolist()


def test_the_prompt_counts_for_repetition() -> None:
    """A token of the prompt is as repeated as one of the answer."""
    params = SamplingParams(repetition_penalty=10.0)
    history = TokenHistory(params, prompt=pack_tokens([4], VOCAB_SIZE))
    logits = torch.ones(1, VOCAB_SIZE)
    logits[0, 4] = 2.0
    assert int(choose_tokens(logits, [step(params, history=history)]).token_ids[0]) == 0
