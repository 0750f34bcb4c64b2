"""Sampling a whole batch at once: the tokens are the rows' own, and nothing is read back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.ops.adjustments import Adjustments, Penalties, adjust_logits
from shared.ops.batch_sampling import SamplingTensors, sample_batch
from shared.ops.errors import ShapeError
from shared.ops.logprobs import token_logprobs
from shared.ops.sampling import SamplingParams, sample

VOCAB_SIZE = 3000

MANY = [
    SamplingParams(),
    SamplingParams(temperature=1e-30, seed=3),
    *(
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for seed, (temperature, top_k, top_p, min_p) in enumerate(
            itertools.product((0.3, 1.0, 5.0), (0, 1, 40, 5000), (1.0, 0.9, 1e-6), (0.0, 0.05, 1.0))
        )
    ),
    SamplingParams(temperature=1.0, seed=(1 << 64) - 1),
]


def at_once(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return sample_batch(logits, SamplingTensors.of(params, positions)).tolist()  # type: ignore[no-any-return]  # torch has no type for it


@pytest.mark.parametrize("spread", [0.01, 3.0, 20.0])
def test_a_batch_draws_what_its_rows_draw_alone(spread: float) -> None:
    """A CPU goes row by row, a GPU does not; the same seed must say the same on either."""
    torch.manual_seed(1)
    logits = torch.randn(len(MANY), VOCAB_SIZE) * spread
    positions = [7 * row % 5000 for row in range(len(MANY))]
    expected = sample(logits, MANY, positions).tolist()
    assert at_once(logits, MANY, positions) == expected
    alone = [
        at_once(logits[row : row + 1], [MANY[row]], [positions[row]])[0] for row in range(len(MANY))
    ]
    assert alone == expected


def test_ties_at_the_edge_are_all_kept() -> None:
    """As row by row: among four equal tokens, top-k 2 can draw each of those that tie."""
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, 2.0, -5.0]).expand(200, -1)
    params = [SamplingParams(temperature=1.0, top_k=2, seed=seed) for seed in range(200)]
    assert set(at_once(logits, params, [0] * 200)) == {1, 2, 3, 4}


def test_a_forbidden_token_is_never_drawn() -> None:
    """-inf is far from every edge, and noise does not bring it back."""
    logits = torch.zeros(100, 8)
    logits[:, :7] = -torch.inf
    params = [SamplingParams(temperature=50.0, top_p=0.5, seed=seed) for seed in range(100)]
    assert at_once(logits, params, [0] * 100) == [7] * 100


def test_greedy_rows_get_no_noise_where_all_are_greedy() -> None:
    """Nothing is sorted or drawn that nobody asked for."""
    how = SamplingTensors.of([SamplingParams(), SamplingParams(top_k=5, top_p=0.5)], [4, 9])
    assert (how.is_drawn, how.is_filtered) == (False, False)
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]])
    assert sample_batch(logits, how).tolist() == [1, 0]


def test_nothing_is_read_back_from_the_device() -> None:
    """Tensors without values refuse whatever depends on one: a graph could not capture it."""
    batch, vocab_size = 4, 64
    with FakeTensorMode():
        logits = torch.empty(batch, vocab_size)
        how = SamplingTensors(
            is_greedy=torch.empty(batch, dtype=torch.bool),
            temperature=torch.empty(batch),
            top_k=torch.empty(batch, dtype=torch.int64),
            top_p=torch.empty(batch, dtype=torch.float64),
            log_min_p=torch.empty(batch),
            seed_words=torch.empty(batch, 2, dtype=torch.int64),
            positions=torch.empty(batch, dtype=torch.int64),
            is_filtered=True,
            is_drawn=True,
        )
        said = Penalties(
            repetition=torch.empty(batch),
            presence=torch.empty(batch),
            frequency=torch.empty(batch),
            is_in_prompt=torch.empty(batch, vocab_size, dtype=torch.bool),
            counts=torch.empty(batch, vocab_size, dtype=torch.int32),
        )
        bias_ids = torch.empty(batch, 3, dtype=torch.int64)
        adjust_logits(
            logits, Adjustments(bias_ids=bias_ids, bias=torch.empty(batch, 3), penalties=said)
        )
        chosen = sample_batch(logits, how)
        likely = token_logprobs(logits, chosen, num_top=5)
    assert chosen.shape == (batch,)
    assert (likely.chosen.shape, likely.top.shape) == ((batch,), (batch, 5))


def test_rows_without_parameters_are_refused() -> None:
    with pytest.raises(ShapeError, match="1 parameters and 2 positions"):
        SamplingTensors.of([SamplingParams()], [0, 0])
    with pytest.raises(ShapeError, match="2 rows and 1 parameters"):
        sample_batch(torch.zeros(2, 4), SamplingTensors.of([SamplingParams()], [0]))
