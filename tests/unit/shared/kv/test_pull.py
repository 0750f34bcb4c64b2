"""Tests of shared/kv/pull.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from shared.kv.errors import CopyError
from shared.kv.layout import DTypeName, KVLayout
from shared.kv.pool import LocalPool
from shared.kv.pull import BlockRun, copy_blocks, runs, slice_blocks


@pytest.fixture
def source(layout: KVLayout) -> Iterator[LocalPool]:
    """A pool whose every element is another number."""
    pool = LocalPool(layout)
    pool.kv.copy_(torch.arange(pool.kv.numel(), dtype=torch.float32).view(layout.shape))
    yield pool
    pool.close()


@pytest.fixture
def target(layout: KVLayout) -> Iterator[LocalPool]:
    """A larger pool, poisonous where nothing was copied."""
    pool = LocalPool(layout.with_num_blocks(12), fill=math.nan)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8]),
        ([7, 1, 4], [2, 11, 1]),
        ([3, 4, 6, 7, 5], [1, 2, 3, 4, 5]),
        ([2, 1], [1, 2]),
        ([3, 3], [1, 2]),
        ([5], [11]),
        ([], []),
    ],
)
def test_every_block_arrives_and_no_other_is_touched(
    source: LocalPool, target: LocalPool, source_ids: list[int], target_ids: list[int]
) -> None:
    """However the ids lie, in runs or scattered, each pair is one block's copy."""
    copy_blocks(source.kv, target.kv, source_ids, target_ids)
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        assert torch.equal(target.kv[target_id], source.kv[source_id])
    untouched = [block for block in range(12) if block not in target_ids]
    assert target.kv[untouched].isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_byte_elements_arrive_bit_for_bit(layout: KVLayout, dtype: DTypeName) -> None:
    """NaNs and denormals are bytes like any others; no arithmetic may touch them."""
    narrow = dataclasses.replace(layout, dtype=dtype)
    source, target = LocalPool(narrow), LocalPool(narrow)
    bits = torch.arange(source.kv.numel()).mul(65_521).remainder(65_536).sub(32_768)
    source.kv.view(torch.int16).copy_(bits.view(layout.shape))
    copy_blocks(source.kv, target.kv, [7, 2], [1, 2])
    for source_id, target_id in ((7, 1), (2, 2)):
        copied = target.kv[target_id].view(torch.int16)
        assert torch.equal(copied, source.kv[source_id].view(torch.int16))
    del copied
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([1, 2], [3], "2 blocks cannot be copied to 1"),
        ([1, 2], [3, 3], "a target block is named twice"),
        ([1, 8], [3, 4], "source block 8 is reserved or not in a pool of 8 blocks"),
        ([1, 0], [3, 4], "source block 0 is reserved"),
        ([1, 2], [3, 12], "target block 12 is reserved or not in a pool of 12 blocks"),
        ([1, 2], [0, 4], "target block 0 is reserved"),
        ([1, -1], [3, 4], "source block -1 is reserved or not"),
        ([1, 2], [3, -1], "target block -1 is reserved or not"),
    ],
)
def test_a_pull_that_makes_no_sense_moves_nothing(
    source: LocalPool, target: LocalPool, source_ids: list[int], target_ids: list[int], message: str
) -> None:
    """The ids come off the wire; a half-done copy would be a corrupt one."""
    with pytest.raises(CopyError, match=message):
        copy_blocks(source.kv, target.kv, source_ids, target_ids)
    assert target.kv.isnan().all()


def test_blocks_of_another_shape_or_type_are_refused(source: LocalPool, target: LocalPool) -> None:
    """The copy would broadcast or convert, and the result would be plausible garbage."""
    with pytest.raises(CopyError, match="are not blocks of"):
        copy_blocks(source.kv[:, :1], target.kv, [1], [1])
    with pytest.raises(CopyError, match=r"float64 are not blocks of .* torch\.float32"):
        copy_blocks(source.kv.double(), target.kv, [1], [1])


def test_neighbours_in_both_pools_are_joined() -> None:
    """One long copy is faster than many short ones."""
    assert [*runs([4, 5, 6, 9, 10, 2], [1, 2, 3, 4, 5, 6])] == [
        BlockRun(4, 1, 3),
        BlockRun(9, 4, 2),
        BlockRun(2, 6, 1),
    ]
    assert [*runs([4, 5, 6], [3, 2, 1])] == [
        BlockRun(4, 3, 1),
        BlockRun(5, 2, 1),
        BlockRun(6, 1, 1),
    ]
    assert [*runs([], [])] == []


def test_a_slice_has_at_least_one_block(layout: KVLayout) -> None:
    """A block larger than the bound still has to be copied."""
    assert slice_blocks(layout, 768 * 5 + 767) == 5
    assert slice_blocks(layout, 1) == 1
