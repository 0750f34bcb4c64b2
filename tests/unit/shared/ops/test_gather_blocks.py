"""Copies of whole blocks between pools."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.gather_blocks import gather_blocks


def test_named_blocks_arrive_and_no_other_changes() -> None:
    """In the order of the ids, which need not be sorted."""
    source, target = torch.randn(4, 2, 3), torch.zeros(5, 2, 3)
    gather_blocks(source, target, torch.tensor([3, 1]), torch.tensor([0, 4]), num_programs=1)
    expected = torch.zeros(5, 2, 3)
    expected[0], expected[4] = source[3], source[1]
    assert torch.equal(target, expected)


def test_pools_of_other_blocks_are_refused() -> None:
    """Bytes copied between them would be garbage."""
    ids = torch.tensor([0])
    with pytest.raises(ShapeError, match="are not blocks of"):
        gather_blocks(torch.zeros(4, 2, 3), torch.zeros(4, 3, 2), ids, ids, num_programs=1)
    with pytest.raises(ShapeError, match="cannot be copied to"):
        gather_blocks(torch.zeros(4, 2), torch.zeros(4, 2), ids, ids[:0], num_programs=1)
