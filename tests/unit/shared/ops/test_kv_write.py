"""Writing into the pool: the right slots, and nothing else."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.kv_write import PAD_SLOT, write_kv

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 5, 3, 2, 4, 6


@pytest.fixture
def kv() -> torch.Tensor:
    """A pool of NaN, so that every written number shows."""
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("slots", [[7], [4, 5, 6, 19, 0], [11, PAD_SLOT, 3, PAD_SLOT], [PAD_SLOT]])
def test_each_row_lands_in_its_slot_and_nowhere_else(kv: torch.Tensor, slots: list[int]) -> None:
    """A row written elsewhere would be another request's cache; padding must write nothing."""
    key = torch.randn(len(slots), NUM_KV_HEADS, HEAD_DIM)
    value = torch.randn(len(slots), NUM_KV_HEADS, HEAD_DIM)
    expected = kv.clone()
    for row, slot in enumerate(slots):
        if slot != PAD_SLOT:
            block, offset = divmod(slot, BLOCK_SIZE)
            expected[block, 1, 0, :, offset] = key[row]
            expected[block, 1, 1, :, offset] = value[row]
    write_kv(kv[:, 1], key, value, torch.tensor(slots))
    torch.testing.assert_close(kv, expected, rtol=0, atol=0, equal_nan=True)


def test_keys_of_another_shape_are_refused(kv: torch.Tensor) -> None:
    """Broadcasting would write one row into every slot and raise nothing."""
    key = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM)
    with pytest.raises(ShapeError, match="2 slots"):
        write_kv(kv[:, 0], key, key, torch.tensor([4, 5]))


def test_keys_of_another_type_are_refused(kv: torch.Tensor) -> None:
    """A silent conversion would round what the peer reads."""
    key = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"torch.float32 pool cannot take torch.bfloat16"):
        write_kv(kv[:, 0], key, key, torch.tensor([4]))
