"""Copies whole blocks from one pool into another, ids and all on the device: the pull of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


def gather_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, *, num_programs: int
) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]` of `target`, for every i.

    Args:
        source: [num_blocks, ...], contiguous; a peer's pool, or any other, only read.
        target: The same but for the number of blocks.
        source_ids: [num_copied] int64.
        target_ids: [num_copied] int64, no block twice.  Ids are not checked here: whoever got them
            from the peer has.
        num_programs: How many thread blocks may copy: few leave room for what runs beside them.
            The reference has none and ignores it.

    Raises:
        ShapeError: A shape or a dtype is not as above, or `num_programs` is not positive.
    """
    check_gather_shapes(source, target, source_ids, target_ids, num_programs)
    target.index_copy_(0, target_ids, source.index_select(0, source_ids))


def check_gather_shapes(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, num_programs: int
) -> None:
    """Raise ShapeError unless the arguments of `gather_blocks` fit together."""
    if source.shape[1:] != target.shape[1:] or source.dtype is not target.dtype:
        raise ShapeError(
            f"blocks of {[*source.shape[1:]]} {source.dtype} are not blocks of "
            f"{[*target.shape[1:]]} {target.dtype}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ShapeError("both pools must be contiguous")
    if source_ids.dim() != 1 or source_ids.shape != target_ids.shape:
        raise ShapeError(f"{[*source_ids.shape]} blocks cannot be copied to {[*target_ids.shape]}")
    if not source_ids.dtype is target_ids.dtype is torch.int64:
        raise ShapeError(f"block ids must be int64, not {source_ids.dtype} {target_ids.dtype}")
    if num_programs < 1:
        raise ShapeError(f"{num_programs} thread blocks copy nothing")
