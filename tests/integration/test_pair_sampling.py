"""Sampling through the whole pair: the answer of one engine, wherever its tokens were sampled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.messages import LogitBias, Resume, Sampling
from shared.daemon.sampling import sampling_params
from shared.engine.local import LocalEngine
from tests.support.pair import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shared.daemon.model_host import ModelHost

MAX_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and what it is about."""

    prompt: list[int]
    sampling: Sampling
    min_tokens: int = 0


def prompt_of(index: int) -> list[int]:
    return [2 + (13 * index + 7 * place) % 250 for place in range(20 + 9 * index)]


CASES = [
    Case(prompt=prompt_of(0), sampling=Sampling(seed=1, repetition_penalty=1.5)),
    Case(
        prompt=prompt_of(1),
        sampling=Sampling(seed=2, temperature=2.0, min_p=0.05, repetition_penalty=1.2),
    ),
    Case(
        prompt=prompt_of(2),
        sampling=Sampling(
            seed=3, temperature=1.0, presence_penalty=2.0, frequency_penalty=0.5, top_p=0.95
        ),
    ),
    Case(
        prompt=prompt_of(3),
        sampling=Sampling(
            seed=4, temperature=3.0, top_k=30, logit_bias=[LogitBias(id=9, bias=4.0)]
        ),
    ),
    Case(prompt=prompt_of(4), sampling=Sampling(seed=5, temperature=4.0), min_tokens=20),
    Case(prompt=prompt_of(5), sampling=Sampling(seed=6)),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("p"), model=tiny_model) as running:
        yield running
        running.wait_settled()


@pytest.fixture(scope="module")
def expected(tiny_host: ModelHost) -> list[list[int]]:
    """What one engine answers, each request alone."""
    engine = LocalEngine(tiny_host.model, num_blocks=64)
    answers = []
    for case in CASES:
        params = sampling_params(
            case.sampling, min_tokens=case.min_tokens, end_ids=tiny_host.spec.eos_ids
        )
        answers += engine.generate([case.prompt], max_tokens=MAX_TOKENS, sampling=params)
    return answers


def ask(pair: Pair, case: Case, *, resume: Resume | None = None) -> list[int]:
    answer = pair.client.generate(
        case.prompt,
        max_tokens=MAX_TOKENS,
        min_tokens=case.min_tokens,
        sampling=case.sampling,
        resume=resume,
    )
    return list(answer.ids)


def test_every_answer_is_that_of_one_engine_alone(pair: Pair, expected: list[list[int]]) -> None:
    """The first token is sampled by prefilld, all others by decoded."""
    assert [ask(pair, case) for case in CASES] == expected


def test_the_batch_changes_no_answer(pair: Pair, expected: list[list[int]]) -> None:
    """Penalties are a sequence's own, and so is its noise."""
    with ThreadPoolExecutor(len(CASES)) as users:
        assert list(users.map(lambda case: ask(pair, case), CASES)) == expected


@pytest.mark.parametrize("num_delivered", [0, 1, 7])
def test_a_resumed_answer_goes_on_as_if_undisturbed(
    pair: Pair, expected: list[list[int]], num_delivered: int
) -> None:
    """Whatever the penalties count was counted again from the ids that the client brought."""
    fingerprint = pair.status()["fingerprint"]
    for case, answer in zip(CASES, expected, strict=True):
        assert case.sampling.seed is not None
        resume = Resume(
            attempt=1,
            seed=case.sampling.seed,
            fingerprint=fingerprint,
            ids=answer[:num_delivered],
        )
        assert ask(pair, case, resume=resume) == answer[num_delivered:]


@pytest.mark.parametrize("stream", [True, False])
def test_probabilities_are_the_model_s_own(
    pair: Pair, tiny_host: ModelHost, *, stream: bool
) -> None:
    """Log-softmax of the logits behind each prefix, whatever was made of them afterwards."""
    answer = pair.client.generate(
        prompt_of(2),
        max_tokens=12,
        ignore_eos=True,
        stream=stream,
        sampling=Sampling(seed=3, temperature=2.0, presence_penalty=1.0),
        logprobs=3,
    )
    engine = LocalEngine(tiny_host.model, num_blocks=64)
    ids = [*prompt_of(2), *answer.ids]
    own = engine.prompt_logits(ids[:-1])[-len(answer.ids) :].log_softmax(-1)
    assert len(answer.logprobs) == len(answer.ids) == 12
    for row, token_id, told in zip(own, answer.ids, answer.logprobs, strict=True):
        assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(3).values
        torch.testing.assert_close(torch.tensor(told.top_logprobs), best, rtol=0, atol=1e-3)
        torch.testing.assert_close(row[told.top_ids], best, rtol=0, atol=1e-3)


def test_a_shortest_answer_has_no_end_before_its_length(pair: Pair, tiny_host: ModelHost) -> None:
    """The end token is wished for with all force, and comes at the first chance."""
    (eos_id,) = tiny_host.spec.eos_ids
    wish = Sampling(seed=1, logit_bias=[LogitBias(id=eos_id, bias=100.0)])
    for min_tokens in (0, 1, 5):
        answer = pair.client.generate(
            prompt_of(1), max_tokens=10, min_tokens=min_tokens, sampling=wish
        )
        assert (len(answer.ids), answer.reason) == (min_tokens + 1, "stop")
        assert answer.ids.index(eos_id) == min_tokens
