"""Tests of shared/kv/arena.py: how large an arena is, and whose memory."""

from __future__ import annotations

import pytest

from shared.kv.arena import PinnedArena, arena_layout, local_arena, pinned_arena
from shared.kv.errors import CudaCallError, GpuFatalError
from shared.kv.layout import KVLayout
from shared.kv.pull import copy_blocks
from tests.support.fake_cuda import FakeCuda, FakeGpus

LARGE = 1 << 40


def test_an_arena_has_as_many_blocks_as_the_pool_at_most(layout: KVLayout) -> None:
    """Whoever is out was in the pool; the reserved block is the same in both."""
    assert arena_layout(layout, max_bytes=LARGE, read_available=lambda: None) == layout


@pytest.mark.parametrize(("max_bytes", "available"), [(3, LARGE), (LARGE, 3), (3, None)])
def test_what_is_allowed_and_what_the_machine_has_bound_it(
    layout: KVLayout, max_bytes: int, available: int | None
) -> None:
    """Three blocks and the reserved one, which holds nothing."""
    unit = layout.block_bytes
    found = arena_layout(
        layout,
        max_bytes=max_bytes if max_bytes == LARGE else max_bytes * unit,
        read_available=lambda: available if available in (None, LARGE) else available * 2 * unit,
    )
    assert found == layout.with_num_blocks(4)


@pytest.mark.parametrize("available", [-5, 0, 1, LARGE])
def test_without_room_for_a_block_there_is_none(layout: KVLayout, available: int) -> None:
    max_bytes = layout.block_bytes - 1
    assert arena_layout(layout, max_bytes=max_bytes, read_available=lambda: available) is None
    assert arena_layout(layout, max_bytes=0) is None


def test_blocks_go_to_the_arena_of_a_cpu_and_come_back(layout: KVLayout) -> None:
    pool, arena = local_arena(layout, max_bytes=LARGE), local_arena(layout, max_bytes=LARGE)
    assert pool is not None
    assert arena is not None
    pool.kv[2].fill_(7)
    copy_blocks(pool.kv, arena.kv, [2], [1])
    pool.kv[2].fill_(0)
    copy_blocks(arena.kv, pool.kv, [1], [3])
    assert bool((pool.kv[3] == 7).all())
    assert local_arena(layout, max_bytes=0) is None


def test_the_arena_of_a_gpu_is_pinned_for_as_long_as_it_lives(layout: KVLayout) -> None:
    """All of it, once: pinning a block when it is needed would hold up the steps."""
    cuda = FakeCuda(FakeGpus())
    arena = PinnedArena.create(layout, max_bytes=LARGE, runtime=cuda)
    assert arena is not None
    assert cuda.pinned == {arena.kv.data_ptr(): layout.pool_bytes}
    arena.close()
    arena.close()
    assert cuda.pinned == {}
    assert PinnedArena.create(layout, max_bytes=0, runtime=cuda) is None


def test_memory_that_cannot_be_pinned_is_no_reason_not_to_serve(layout: KVLayout) -> None:
    """Answers that must make room break off then; the reason is told."""
    cuda = FakeCuda(FakeGpus())
    cuda.fails["pin"] = 2
    with pytest.raises(CudaCallError, match="pin"):
        PinnedArena.create(layout, max_bytes=LARGE, runtime=cuda)
    fault = pinned_arena(layout, max_bytes=LARGE, runtime=cuda)
    assert isinstance(fault, str)
    assert "pin" in fault


def test_a_gpu_that_is_lost_meanwhile_is(layout: KVLayout) -> None:
    """Nothing mends it, and going on would only hide it."""
    cuda = FakeCuda(FakeGpus())
    cuda.fails["pin"] = 700
    with pytest.raises(GpuFatalError, match="pin"):
        pinned_arena(layout, max_bytes=LARGE, runtime=cuda)
