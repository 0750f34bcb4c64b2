"""The gate of the feed-forward layer."""

from __future__ import annotations

import pytest
import torch

from shared.ops.activation import silu_mul
from shared.ops.errors import ShapeError


def test_the_first_half_gates_the_second() -> None:
    """The halves must not be swapped: silu is not symmetric."""
    torch.manual_seed(0)
    gate, up = torch.randn(3, 10), torch.randn(3, 10)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), expected)


def test_an_odd_row_is_refused() -> None:
    """It cannot be two halves."""
    with pytest.raises(ShapeError, match="rows of 7"):
        silu_mul(torch.zeros(1, 7))
