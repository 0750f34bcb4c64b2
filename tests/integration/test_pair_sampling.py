"""Sampling through the whole pair: the answer of one engine, wherever its tokens were sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from protocol.messages import LogitBias, Sampling
from shared.engine.local import LocalEngine
from tests.support.everyday import SAMPLING_PLANS, check_sampling
from tests.support.pair import Pair
from tests.support.solo import SoloEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shared.daemon.model_host import ModelHost

PLAN = SAMPLING_PLANS[2]


@pytest.fixture(scope="module", params=["pull", "direct"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Pair]:
    settings = {"pool.access": request.param}
    with Pair(tmp_path_factory.mktemp("p"), model=tiny_model, settings=settings) as running:
        yield running
        running.wait_settled()


def test_every_answer_is_that_of_one_engine_alone(pair: Pair, tiny_host: ModelHost) -> None:
    """Alone, in a batch, resumed.  The first token is sampled by prefilld, others by decoded.

    Penalties are a sequence's own, and so is its noise; what penalties count was counted again from
    the ids that the client brought.
    """
    check_sampling(pair, SoloEngine(tiny_host))


@pytest.mark.parametrize("stream", [True, False])
def test_probabilities_are_the_model_s_own(
    pair: Pair, tiny_host: ModelHost, *, stream: bool
) -> None:
    """Log-softmax of the logits behind each prefix, whatever was made of them afterwards."""
    answer = pair.client.generate(
        PLAN.prompt,
        max_tokens=12,
        ignore_eos=True,
        stream=stream,
        sampling=Sampling(seed=3, temperature=2.0, presence_penalty=1.0),
        logprobs=3,
    )
    engine = LocalEngine(tiny_host.model, num_blocks=64)
    ids = [*PLAN.prompt, *answer.ids]
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
            PLAN.prompt, max_tokens=10, min_tokens=min_tokens, sampling=wish
        )
        assert (len(answer.ids), answer.reason) == (min_tokens + 1, "stop")
        assert answer.ids.index(eos_id) == min_tokens
