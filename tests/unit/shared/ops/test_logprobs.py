"""How likely tokens were: transformers' own logits through log-softmax."""

from __future__ import annotations

import torch

from shared.ops.logprobs import token_logprobs


def test_chosen_and_likeliest_tokens_are_told_with_their_logarithms() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 40) * 3
    likely = token_logprobs(logits, torch.tensor([7, 8]), num_top=3)
    expected = logits.double().log_softmax(-1)
    for index, token_id in enumerate((7, 8)):
        row = likely.row(index, 3)
        assert abs(row.logprob - float(expected[index, token_id])) < 1e-5
        best = expected[index].topk(3)
        assert [top_id for top_id, _ in row.top] == best.indices.tolist()
        told = torch.tensor([logprob for _, logprob in row.top], dtype=torch.float64)
        torch.testing.assert_close(told, best.values, rtol=0, atol=1e-5)


def test_a_row_is_told_as_many_as_it_asked_for() -> None:
    """The batch is computed for the one that wants most."""
    likely = token_logprobs(torch.zeros(1, 5), torch.tensor([4]), num_top=3)
    assert len(likely.row(0, 0).top) == 0
    assert len(likely.row(0, 2).top) == 2


def test_broken_weights_give_finite_numbers() -> None:
    """What is no number cannot be told to a client, and must not end the daemon."""
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, -torch.inf, 1.0]])
    likely = token_logprobs(logits, torch.tensor([1, 1]), num_top=3)
    assert all(torch.isfinite(values).all() for values in (likely.chosen, likely.top))
