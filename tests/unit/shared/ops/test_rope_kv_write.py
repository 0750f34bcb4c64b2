"""Rotation and write in one against the two ops that it is made of."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.kv_write import PAD_SLOT
from shared.ops.rope_kv_write import rope_kv_write
from shared.ops.rotary import apply_rotary, rotary_angles


def test_queries_and_keys_turn_and_values_do_not() -> None:
    """A token's heads are queries, then keys, then values."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 3 + 1 + 1, 4)
    cos, sin = rotary_angles(torch.tensor([5, 9]), torch.tensor([1.0, 0.1]))
    pool = torch.zeros(3, 2, 1, 2, 4)
    query = rope_kv_write(qkv, cos, sin, pool, torch.tensor([PAD_SLOT, 3]))
    turned = apply_rotary(qkv, cos, sin)
    assert torch.equal(query, turned[:, :3])
    expected = torch.zeros_like(pool)
    expected[1, 0, 0, 1], expected[1, 1, 0, 1] = turned[1, 3], qkv[1, 4]
    assert torch.equal(pool, expected)


def test_heads_that_leave_no_query_are_refused() -> None:
    """Two heads are one key and one value."""
    angles, pool = torch.zeros(1, 1, 4), torch.zeros(3, 2, 1, 2, 4)
    with pytest.raises(ShapeError, match="2 heads of 4 hold no keys and values"):
        rope_kv_write(torch.zeros(1, 2, 4), angles, angles, pool, torch.tensor([1]))
