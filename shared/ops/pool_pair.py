"""The two pools that a block table of decoded may name: its own and the one prefilld exported.

An entry of a block table is an int32 whose sign says which pool the block is in: `block` is a block
of the own pool, `~block` (that is, `-1 - block`) the same number in the peer's.

Kernels take the pools' addresses from a tensor and never as arguments.  A CUDA graph keeps the
arguments that it was captured with; with a new epoch the peer's pool lies elsewhere, and the graph
must follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolPair:
    """Two pools whose blocks are alike, and the tensor that holds their addresses."""

    own: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous."""
    peer: Tensor
    """As `own` but for the number of blocks.  `own` itself where no peer is mapped."""
    bases: Tensor
    """[2] int64 on the pools' device: the addresses of `own` and `peer`."""

    @classmethod
    def of(cls, own: Tensor, peer: Tensor | None = None) -> PoolPair:
        """Pair two pools, or one with itself.

        Raises:
            ShapeError: A pool is not contiguous, or the blocks of the two differ.
        """
        peer = own if peer is None else peer
        _check(own, peer)
        bases = torch.tensor([own.data_ptr(), peer.data_ptr()], device=own.device)
        return cls(own=own, peer=peer, bases=bases)

    def with_peer(self, peer: Tensor | None) -> PoolPair:
        """Return the pair with another peer, or with none, over the same `bases`.

        Graphs captured over this pair read the new peer from then on, in the order of the current
        stream.

        Raises:
            ShapeError: As `of`.
        """
        peer = self.own if peer is None else peer
        _check(self.own, peer)
        self.bases[1] = peer.data_ptr()
        return PoolPair(own=self.own, peer=peer, bases=self.bases)


def peer_entries(block_ids: Tensor) -> Tensor:
    """Return the block-table entries that name these blocks of the peer's pool."""
    return ~block_ids


def _check(own: Tensor, peer: Tensor) -> None:
    """Raise ShapeError unless both pools are contiguous and their blocks alike."""
    if own.dim() != 6 or not (own.is_contiguous() and peer.is_contiguous()):
        raise ShapeError(f"pools of shapes {[*own.shape]} and {[*peer.shape]} are not block-major")
    if own.shape[1:] != peer.shape[1:] or own.dtype is not peer.dtype:
        raise ShapeError(
            f"blocks of {[*peer.shape[1:]]} {peer.dtype} cannot stand beside blocks of "
            f"{[*own.shape[1:]]} {own.dtype}"
        )
