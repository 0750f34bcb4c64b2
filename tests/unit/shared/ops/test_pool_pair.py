"""Pairs of pools: what the kernels find behind an entry's sign."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair, peer_entries

SHAPE = (3, 1, 2, 1, 2, 4)


def test_every_block_of_the_peer_has_a_negative_entry() -> None:
    """Block 0 included, whose negative would be itself."""
    entries = peer_entries(torch.tensor([0, 5, 2**31 - 1], dtype=torch.int32))
    assert entries.tolist() == [-1, -6, -(2**31)]


def test_the_tensor_of_addresses_outlives_a_peer() -> None:
    """Graphs keep the tensor, so a new epoch must only change what is in it."""
    own, peer = torch.zeros(SHAPE), torch.zeros(SHAPE)
    alone = PoolPair.of(own)
    assert alone.bases.tolist() == [own.data_ptr()] * 2
    paired = alone.with_peer(peer)
    assert paired.bases is alone.bases
    assert paired.bases.tolist() == [own.data_ptr(), peer.data_ptr()]
    assert paired.with_peer(None).bases.tolist() == [own.data_ptr()] * 2


@pytest.mark.parametrize(
    "peer",
    [
        torch.zeros(3, 1, 2, 1, 4, 4),
        torch.zeros(SHAPE).half(),
        torch.zeros(SHAPE).mT.contiguous().mT,
    ],
    ids=["blocks of another size", "another dtype", "other strides"],
)
def test_pools_that_differ_cannot_be_paired(peer: torch.Tensor) -> None:
    """One set of strides serves both."""
    with pytest.raises(ShapeError, match=r"cannot stand beside|not block-major"):
        PoolPair.of(torch.zeros(SHAPE)).with_peer(peer)
