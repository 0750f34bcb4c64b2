"""Sampling: which tokens are in the draw, how often each is drawn, and what the draw depends on."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.sampling import NOISE_SPAN, SamplingParams, candidates, sample

VOCAB_SIZE = 3000


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the ids that transformers' warpers leave, in `generate`'s order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.int64), logits.unsqueeze(0))
    (ids,) = torch.isfinite(scores[0]).nonzero(as_tuple=True)
    return ids


@pytest.mark.parametrize("top_k", [0, 1, 40, 2500, VOCAB_SIZE + 5])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_the_draw_is_among_the_tokens_that_transformers_keeps(
    temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """A user who brings settings from there must get the same set of tokens."""
    torch.manual_seed(0)
    logits = torch.randn(VOCAB_SIZE) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, scaled = candidates(logits, params)
    assert torch.equal(ids, kept_by_transformers(logits, params))
    expected = (logits / temperature)[ids]
    torch.testing.assert_close(scaled, expected - expected.max(), rtol=1e-4, atol=1e-4)


def test_a_flat_nucleus_is_wider_than_what_is_sorted_first() -> None:
    """With equal probabilities the nucleus has thousands of tokens; all of them must be found."""
    torch.manual_seed(0)
    logits = torch.randn(20_000) * 1e-3
    params = SamplingParams(temperature=1.0, top_p=0.9)
    ids, _ = candidates(logits, params)
    assert abs(len(ids) - len(kept_by_transformers(logits, params))) <= 1
    assert len(ids) > 17_000


def test_ties_at_the_edge_are_all_kept() -> None:
    """What a sort does with equal values must not decide what can be said."""
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -5.0])
    by_rank, _ = candidates(logits, SamplingParams(temperature=1.0, top_k=2))
    by_mass, _ = candidates(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert by_rank.tolist() == by_mass.tolist() == [1, 2, 3, 4]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """Two processes must agree on a tie."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 0.0]])
    assert sample(logits, [SamplingParams()] * 2, [4, 9]).tolist() == [1, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9, seed=2),
    ],
    ids=["plain", "filtered"],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(params: SamplingParams) -> None:
    """Chi-square of 4,000 draws; at up to 9 degrees of freedom 40 is one in 100,000."""
    torch.manual_seed(3)
    logits, num_draws = torch.randn(10) * 1.5, 4000
    drawn = sample(logits.expand(num_draws, -1), [params] * num_draws, range(num_draws))
    ids, scaled = candidates(logits, params)
    counts = torch.bincount(drawn, minlength=10)
    assert int(counts[ids].sum()) == num_draws
    expected = scaled.softmax(-1) * num_draws
    assert float(((counts[ids] - expected) ** 2 / expected).sum()) < 40


def test_a_row_does_not_feel_its_neighbours() -> None:
    """The same row, seed and position give the same token in any batch."""
    torch.manual_seed(4)
    logits = torch.randn(6, VOCAB_SIZE) * 3
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.5, top_k=50, seed=6),
        SamplingParams(temperature=1.0, top_p=0.9, seed=(1 << 64) - 1),
        SamplingParams(temperature=2.0, top_k=5, top_p=0.5, seed=0),
        SamplingParams(temperature=1e-30, seed=3),
    ]
    positions = [3, 4, 5, 8000, 0, 1]
    together = sample(logits, params, positions).tolist()
    alone = [
        int(sample(logits[row : row + 1], [params[row]], [positions[row]])) for row in range(6)
    ]
    assert together == alone
    backwards = sample(logits.flip(0), params[::-1], positions[::-1]).tolist()
    assert backwards == together[::-1]


def test_the_draw_depends_on_seed_and_position() -> None:
    """Among 3,000 equal tokens, another key practically always is another token."""
    logits = torch.zeros(1, VOCAB_SIZE)
    draws = {
        int(sample(logits, [SamplingParams(temperature=1.0, seed=seed)], [position]))
        for seed, position in [(0, 0), (0, 1), (1, 0), (1 << 32, 0)]
    }
    assert len(draws) == 4


def test_tokens_too_unlikely_to_win_get_no_noise_and_change_nothing() -> None:
    """The bound is exact: the draw is the one that noise for every token would give."""
    from shared.ops.philox import uniform

    torch.manual_seed(5)
    logits = torch.randn(VOCAB_SIZE) * 10
    assert float((logits < logits.max() - NOISE_SPAN).float().mean()) > 0.5
    for position in range(50):
        noise = -(-uniform(torch.arange(VOCAB_SIZE), position=position, seed=9).log()).log()
        params = SamplingParams(temperature=1.0, seed=9)
        drawn = sample(logits.unsqueeze(0), [params], [position])
        assert int(drawn) == int((logits - logits.max() + noise).argmax())


def test_a_vanishing_temperature_is_greedy() -> None:
    """Dividing by it must not overflow into NaN."""
    logits = torch.tensor([[1.0, 30.0, 29.0]])
    assert int(sample(logits, [SamplingParams(temperature=1e-38)], [0])) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("logit_bias", ((3, float("nan")),)),
        ("logit_bias", ((3, float("inf")),)),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    """The message names the field."""
    with pytest.raises(ValueError, match=f"^{field} is"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_rows_without_parameters_are_refused() -> None:
    """A row that is silently not sampled would stall its request."""
    with pytest.raises(ShapeError, match="2 rows, 1 parameters and 2 positions"):
        sample(torch.zeros(2, 4), [SamplingParams()], [0, 0])
