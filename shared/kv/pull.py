"""Copying blocks from one pool into another: what decoded does with what it was handed.

A pull is done in slices of bounded size, so that whoever shares the thread with it waits for
one slice and not for the prompt.  A block is copied whole; what lies in it behind the last token
is whatever was there before, and attention never reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.kv.errors import CopyError
from shared.kv.layout import RESERVED_BLOCK, KVLayout

DEFAULT_SLICE_BYTES = 8 << 20
"""One to two milliseconds on a CPU (4 to 7 GB/s), a fraction of any decode step there."""


class BlockRun(NamedTuple):
    """Neighbouring blocks that are copied to neighbouring places, in one piece."""

    source: int
    """First block in the source pool."""
    target: int
    """First block in the target pool."""
    num_blocks: int


def slice_blocks(layout: KVLayout, max_slice_bytes: int = DEFAULT_SLICE_BYTES) -> int:
    """Return how many blocks a slice of at most `max_slice_bytes` has, and at least one."""
    return max(1, max_slice_bytes // layout.block_bytes)


def runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[BlockRun]:
    """Join pairs of blocks that follow each other in both pools; order and pairs are kept."""
    start = 0
    for end in range(1, len(source_ids) + 1):
        if (
            end < len(source_ids)
            and source_ids[end] == source_ids[end - 1] + 1
            and target_ids[end] == target_ids[end - 1] + 1
        ):
            continue
        yield BlockRun(source_ids[start], target_ids[start], end - start)
        start = end


def check_copy(
    source_kv: Tensor, target_kv: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
) -> None:
    """Raise CopyError unless `copy_blocks` could copy these blocks."""
    if source_kv.shape[1:] != target_kv.shape[1:] or source_kv.dtype != target_kv.dtype:
        raise CopyError(
            f"blocks of {[*source_kv.shape[1:]]} {source_kv.dtype} are not blocks of "
            f"{[*target_kv.shape[1:]]} {target_kv.dtype}"
        )
    if len(source_ids) != len(target_ids):
        raise CopyError(f"{len(source_ids)} blocks cannot be copied to {len(target_ids)}")
    if len(set(target_ids)) != len(target_ids):
        raise CopyError("a target block is named twice")
    _check_ids("source", source_ids, source_kv.shape[0])
    _check_ids("target", target_ids, target_kv.shape[0])


def copy_blocks(
    source_kv: Tensor, target_kv: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
) -> None:
    """Copy blocks between two pools; everything is checked before the first byte moves.

    Args:
        source_kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; read only.
        target_kv: The same but for `num_blocks`, same dtype.
        source_ids: Block ids in the source.
        target_ids: Block ids in the target, one for each of the source's and each but once.

    Raises:
        CopyError: The blocks of the pools differ in shape or dtype, the lengths differ, a target
            is named twice, or an id is reserved or outside its pool.

    Returns when the blocks are copied.  The interpreter lock is free meanwhile.

    The copy is numpy's, on this thread alone.  Torch would split every block among its threads,
    and where both daemons share the cores each block would wait for the slowest of them: that has
    been seen to cost a factor of 60, and on idle cores plain copying is no slower.
    """
    check_copy(source_kv, target_kv, source_ids, target_ids)
    source_bytes, target_bytes = _bytes_by_block(source_kv), _bytes_by_block(target_kv)
    for source, target, num_blocks in runs(source_ids, target_ids):
        np.copyto(
            target_bytes[target : target + num_blocks], source_bytes[source : source + num_blocks]
        )


def _bytes_by_block(kv: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return a pool's memory as [num_blocks, block_bytes]; numpy does not know every dtype."""
    return kv.view(kv.shape[0], -1).view(torch.uint8).numpy()


def _check_ids(side: str, ids: Sequence[int], num_blocks: int) -> None:
    """Raise CopyError unless every id is a block of a pool of `num_blocks` and not reserved."""
    if not ids:
        return
    # A negative id would count from the pool's end, as Python's indices do.
    for block in (min(ids), max(ids)):
        if not RESERVED_BLOCK < block < num_blocks:
            raise CopyError(
                f"{side} block {block} is reserved or not in a pool of {num_blocks} blocks"
            )
