"""Contexts out of their blocks, and attention over parts of one."""

from __future__ import annotations

import pytest
import torch

from shared.ops.context import gather_context, join_attention
from shared.ops.errors import ShapeError


def test_tokens_come_in_order_with_zeros_behind() -> None:
    """What the pool holds behind the last token, NaN here, must not reach a product."""
    pool = torch.full((6, 2, 2, 2, 4, 3), float("nan"))
    tokens = torch.randn(2, 6, 2, 3)
    pool[5, 1] = tokens[:, :4].transpose(1, 2)
    pool[2, 1, :, :, :2] = tokens[:, 4:].transpose(1, 2)
    context = gather_context(pool[:, 1], torch.tensor([5, 2]), 6, padded_len=8)
    assert torch.equal(context[:, :6], tokens)
    assert not context[:, 6:].any()


def test_two_parts_join_to_the_whole() -> None:
    """However different the parts' sums are."""
    torch.manual_seed(0)
    scores, values = 20 * torch.randn(5, 3, 12), torch.randn(5, 12, 8)

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        attended = scores[..., part].softmax(-1) @ values[:, part]
        return attended.transpose(0, 1).contiguous(), scores[..., part].logsumexp(-1)

    out, logs = attend(slice(0, 7))
    join_attention(out, logs, *attend(slice(7, 12)))
    expected, expected_logs = attend(slice(0, 12))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logs, expected_logs)


def test_what_does_not_fit_is_refused() -> None:
    """An op would read beside its tensors."""
    pool = torch.zeros(6, 2, 2, 4, 3)
    with pytest.raises(ShapeError, match=r"\[1\] blocks of 4 do not fit a context of 6"):
        gather_context(pool, torch.tensor([5]), 6, padded_len=8)
    with pytest.raises(ShapeError, match="5 tokens cannot hold a context of 6"):
        gather_context(pool, torch.tensor([5, 1]), 6, padded_len=5)
    out, logs = torch.zeros(3, 5, 8), torch.zeros(5, 3)
    with pytest.raises(ShapeError, match="do not join"):
        join_attention(out, logs, out, logs.t())
    with pytest.raises(ShapeError, match="must be contiguous"):
        join_attention(out, logs, torch.zeros(5, 3, 8).transpose(0, 1), logs)
