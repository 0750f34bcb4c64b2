"""The exact greedy choice from rough scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.ops.greedy import MAX_SHARE_RESCORED, GreedyHead

VOCAB, HIDDEN = 512, 64


def random_weight(seed: int, *, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(VOCAB, HIDDEN, generator=generator)
    return rows * torch.rand(VOCAB, 1, generator=generator).mul_(spread).exp_()


@given(seed=st.integers(0, 2**32), scale=st.floats(1e-3, 1e3), spread=st.floats(0.0, 6.0))
def test_the_choice_is_that_of_the_whole_product(seed: int, scale: float, spread: float) -> None:
    """Whatever the sizes of rows and states; the winner must beat all others by float64 too."""
    weight = random_weight(seed, spread=spread)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed + 1)) * scale
    logits = hidden.double() @ weight.double().t()
    chosen = GreedyHead(weight).argmax(hidden)
    best = logits.max(1).values
    taken = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    # Only what float32 itself cannot tell apart may be chosen in the best one's place.
    assert ((best - taken) <= 1e-5 * best.abs()).all()


def test_a_tie_goes_to_the_lowest_id() -> None:
    weight = random_weight(1)
    weight[100] = weight[300] = weight[7] = weight.abs().max() * torch.sign(weight[7])
    assert GreedyHead(weight).argmax(weight[7].unsqueeze(0)).tolist() == [7]


def test_a_winner_that_rough_scores_hide_is_found() -> None:
    """Two rows that 8 bits cannot tell apart: the bound keeps both, float32 decides."""
    weight = random_weight(2) * 0.01
    weight[40] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    weight[11] = weight[40] * (1 + 1e-4)
    hidden = weight[40].unsqueeze(0)
    assert GreedyHead(weight).argmax(hidden).tolist() == [11]
    weight[11] = weight[40] * (1 - 1e-4)
    assert GreedyHead(weight).argmax(hidden).tolist() == [40]


def test_rows_do_not_depend_on_each_other() -> None:
    head = GreedyHead(random_weight(4))
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    alone = [int(head.argmax(row.unsqueeze(0))) for row in hidden]
    assert head.argmax(hidden).tolist() == alone


def test_where_nearly_all_could_win_the_whole_product_decides() -> None:
    """Gathering most of the rows would cost more than reading all of them."""
    weight = random_weight(6)[:1].repeat(VOCAB, 1)
    weight[200] += 1e-4 * torch.sign(weight[200])
    assert MAX_SHARE_RESCORED < 1
    assert GreedyHead(weight).argmax(weight[:1]).tolist() == [200]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_state_that_is_not_finite_or_nothing_is_not_hidden(value: float) -> None:
    """It chooses what `argmax` over its logits chooses, and does not fail."""
    weight = random_weight(7)
    hidden = torch.full((1, HIDDEN), value)
    expected = torch.nn.functional.linear(hidden, weight).argmax(-1)
    assert GreedyHead(weight).argmax(hidden).tolist() == expected.tolist()


def test_a_row_of_zeros_can_win() -> None:
    """Padding rows of a vocabulary are zero; their scale must not divide by it."""
    weight = -random_weight(8).abs()
    weight[31] = 0
    assert GreedyHead(weight).argmax(torch.ones(1, HIDDEN)).tolist() == [31]
