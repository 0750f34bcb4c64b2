"""Bias and penalties: the numbers are transformers' and OpenAI's."""

from __future__ import annotations

import math

import pytest
import torch

from shared.ops.adjustments import Adjustments, Penalties, adjust_logits
from shared.ops.errors import ShapeError

BATCH, VOCAB_SIZE = 3, 50


def no_bias(batch: int = BATCH) -> dict[str, torch.Tensor]:
    return {
        "bias_ids": torch.zeros(batch, 0, dtype=torch.int64),
        "bias": torch.zeros(batch, 0),
    }


def penalties_of(
    prompts: list[list[int]],
    answers: list[list[int]],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Penalties:
    is_in_prompt = torch.zeros(len(prompts), VOCAB_SIZE, dtype=torch.bool)
    counts = torch.zeros(len(prompts), VOCAB_SIZE, dtype=torch.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        is_in_prompt[row, prompt] = True
        for token_id in answer:
            counts[row, token_id] += 1
    column = torch.ones(len(prompts))
    return Penalties(
        repetition=column * repetition,
        presence=column * presence,
        frequency=column * frequency,
        is_in_prompt=is_in_prompt,
        counts=counts,
    )


def adjusted(logits: torch.Tensor, **fields: object) -> torch.Tensor:
    """Return changed logits; what is not named changes nothing."""
    changed = logits.clone()
    everything: dict[str, object] = {**no_bias(len(logits)), "penalties": None, **fields}
    adjust_logits(changed, Adjustments(**everything))  # type: ignore[arg-type]  # named by tests
    return changed


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, VOCAB_SIZE) * 3


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(
    logits: torch.Tensor, penalty: float
) -> None:
    """It looks at the prompt and the answer alike, and once at each token."""
    from transformers import RepetitionPenaltyLogitsProcessor

    prompts, answers = [[1, 2, 2, 3]] * BATCH, [[4, 4], [1, 5], [6, 49]]
    ids = torch.tensor(
        [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    )
    said = penalties_of(prompts, answers, repetition=penalty)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    torch.testing.assert_close(adjusted(logits, penalties=said), expected, rtol=0, atol=0)


def test_presence_and_frequency_are_taken_as_openai_says(logits: torch.Tensor) -> None:
    """`logit - count * frequency - (count > 0) * presence`, over the answer and not the prompt."""
    answers = [[7, 7, 7, 9], [], [0]]
    said = penalties_of([[1], [7], []], answers, presence=0.5, frequency=0.25)
    expected = logits.clone()
    expected[0, 7] -= 3 * 0.25 + 0.5
    expected[0, 9] -= 0.25 + 0.5
    expected[2, 0] -= 0.25 + 0.5
    torch.testing.assert_close(adjusted(logits, penalties=said), expected)


def test_the_bias_is_that_of_transformers(logits: torch.Tensor) -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {3: 2.5, 11: -100.0, 49: 0.125}
    theirs = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})
    changed = adjusted(
        logits,
        bias_ids=torch.tensor([list(bias)] * BATCH),
        bias=torch.tensor([list(bias.values())] * BATCH),
    )
    expected = theirs(torch.zeros(BATCH, 1, dtype=torch.int64), logits)
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)


def test_the_bias_comes_before_the_penalty_as_in_transformers(logits: torch.Tensor) -> None:
    """The order is seen where the bias turns a logit's sign."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    logits[:, 5] = -1.0
    theirs = LogitsProcessorList(
        [SequenceBiasLogitsProcessor({(5,): 3.0}), RepetitionPenaltyLogitsProcessor(2.0)]
    )
    changed = adjusted(
        logits,
        bias_ids=torch.full((BATCH, 1), 5),
        bias=torch.full((BATCH, 1), 3.0),
        penalties=penalties_of([[5]] * BATCH, [[]] * BATCH, repetition=2.0),
    )
    expected = theirs(torch.full((BATCH, 1), 5), logits)
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)
    assert changed[0, 5] == 1.0


def test_what_is_forbidden_stays_so_whatever_else_is_added(logits: torch.Tensor) -> None:
    """A stop token with a bias of its own is still no token before `min_tokens`."""
    changed = adjusted(
        logits,
        bias_ids=torch.tensor([[4, 4, 0]] * BATCH),
        bias=torch.tensor([[100.0, -math.inf, 0.0]] * BATCH),
        penalties=penalties_of([[4]] * BATCH, [[4]] * BATCH, repetition=0.5, presence=-100.0),
    )
    assert torch.equal(changed[:, 4], torch.full((BATCH,), -math.inf))
    assert not changed.isnan().any()


def test_a_row_without_penalties_is_left_alone_beside_one_that_has_some(
    logits: torch.Tensor,
) -> None:
    """Dividing by 1 is exact, and padding adds 0."""
    said = penalties_of([[1, 2]] * BATCH, [[3]] * BATCH)
    said.repetition[1] = 1.5
    changed = adjusted(logits, penalties=said)
    assert torch.equal(changed[0], logits[0])
    assert torch.equal(changed[2], logits[2])
    assert not torch.equal(changed[1], logits[1])


def test_shapes_that_do_not_fit_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="3 rows cannot take a bias of shapes"):
        adjusted(logits, bias=torch.zeros(BATCH, 2))
    with pytest.raises(ShapeError, match="cannot take counts of"):
        adjusted(logits, penalties=penalties_of([[1]], [[1]]))
