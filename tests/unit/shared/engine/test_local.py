"""The local engine: chunks, batches and a crowded pool change nothing in the answers."""

from __future__ import annotations

import pytest
import torch

from shared.engine.local import LocalEngine
from shared.kv.errors import OutOfBlocksError
from shared.model.llama import Llama
from shared.ops.sampling import SamplingParams
from tests.support.tiny_llama import random_tensors, tiny_spec
from tests.support.transformers_reference import generate_greedily, llama_for_causal_lm

BLOCK_SIZE = 4
SPEC = tiny_spec()
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 97, (n,), generator=GENERATOR).tolist() for n in (1, 3, 4, 5, 30)]


def engine(*, num_blocks: int = 60, token_budget: int = 512) -> LocalEngine:
    return LocalEngine(
        Llama(SPEC, random_tensors(SPEC)),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        token_budget=token_budget,
        fill=float("nan"),
    )


def test_greedy_answers_are_those_of_transformers() -> None:
    """Prompts on every side of a block's border, all in one batch."""
    reference = llama_for_causal_lm(SPEC, random_tensors(SPEC))
    expected = [generate_greedily(reference, prompt, num_tokens=12) for prompt in PROMPTS]
    assert engine().generate(PROMPTS, max_tokens=12, ignore_eos=True) == expected


@pytest.mark.parametrize("token_budget", [1, 3, 4, 7])
def test_chunks_do_not_change_the_answers(token_budget: int) -> None:
    """Sampled ones included: noise is keyed by the position, not by the step."""
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(len(PROMPTS))]
    whole = engine().generate(PROMPTS, max_tokens=6, sampling=sampling, ignore_eos=True)
    chunked = engine(token_budget=token_budget)
    assert whole == chunked.generate(PROMPTS, max_tokens=6, sampling=sampling, ignore_eos=True)


@pytest.mark.parametrize("token_budget", [1, 5, 16])
def test_prompt_logits_do_not_depend_on_the_chunks(token_budget: int) -> None:
    """To float32 rounding: products of other sizes add in another order."""
    whole = engine().prompt_logits(PROMPTS[-1])
    chunked = engine(token_budget=token_budget).prompt_logits(PROMPTS[-1])
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)


def test_requests_wait_for_blocks_and_reuse_them() -> None:
    """A pool for one request at a time gives the same answers as a roomy one."""
    crowded = engine(num_blocks=11)
    expected = engine().generate(PROMPTS, max_tokens=8, ignore_eos=True)
    assert crowded.generate(PROMPTS, max_tokens=8, ignore_eos=True) == expected
    assert crowded.generate(PROMPTS[::-1], max_tokens=8, ignore_eos=True) == expected[::-1]


def test_an_answer_ends_with_the_end_token() -> None:
    """It is delivered, and nothing comes after it."""
    sampling = SamplingParams(temperature=5.0, seed=11)
    (endless,) = engine().generate([PROMPTS[0]], max_tokens=200, sampling=sampling, ignore_eos=True)
    assert len(endless) == 200
    assert 2 in endless
    (answer,) = engine().generate([PROMPTS[0]], max_tokens=200, sampling=sampling)
    assert answer == endless[: endless.index(2) + 1]


def test_a_request_larger_than_the_pool_is_refused_and_frees_the_others() -> None:
    """Nothing would ever be freed for it; afterwards the engine is whole."""
    crowded = engine(num_blocks=6)
    with pytest.raises(OutOfBlocksError, match="10"):
        crowded.generate([PROMPTS[0], PROMPTS[-1]], max_tokens=8, ignore_eos=True)
    assert len(crowded.generate([PROMPTS[0]], max_tokens=8, ignore_eos=True)[0]) == 8


def test_a_budget_of_nothing_is_refused() -> None:
    """Its steps would be empty for ever."""
    with pytest.raises(ValueError, match="token_budget is 0"):
        engine(token_budget=0)
