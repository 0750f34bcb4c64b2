"""Tests of shared/kv/pool.py: what every kind of pool must do, and the local one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from shared.kv.cuda_ipc import CudaIpcMapping, CudaIpcPool
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.errors import PoolAllocationError, PoolClosedError, PoolInUseError
from shared.kv.layout import DTypeName, KVLayout
from shared.kv.memfd import MemfdMapping, MemfdPool
from shared.kv.pool import TORCH_DTYPES, KVPool, LocalPool
from tests.support.fake_cuda import FakeCuda, FakeGpus

Maker = Callable[[KVLayout], KVPool]


def make_mapping(layout: KVLayout) -> MemfdMapping:
    """Map a pool whose maker is gone already."""
    pool = MemfdPool.create(layout)
    fd = pool.export()
    pool.close()
    mapping = MemfdMapping.open(fd, layout, layout.pool_bytes)
    os.close(fd)
    return mapping


def make_cuda_local(layout: KVLayout, fill: float | None = None) -> LocalCudaPool:
    return LocalCudaPool.create(layout, device=0, fill=fill, runtime=FakeCuda(FakeGpus()))


def make_cuda_ipc(layout: KVLayout, fill: float | None = None) -> CudaIpcPool:
    return CudaIpcPool.create(layout, device=0, fill=fill, runtime=FakeCuda(FakeGpus()))


def make_cuda_mapping(layout: KVLayout) -> CudaIpcMapping:
    """Map a pool whose maker is gone already."""
    gpus = FakeGpus()
    pool = CudaIpcPool.create(layout, device=0, runtime=FakeCuda(gpus))
    mapping = CudaIpcMapping.open(pool.export(), layout, device=0, runtime=FakeCuda(gpus))
    pool.close()
    return mapping


MAKERS: list[Maker] = [
    LocalPool,
    MemfdPool.create,
    make_mapping,
    make_cuda_local,
    make_cuda_ipc,
    make_cuda_mapping,
]
WRITABLE: list[Maker] = [LocalPool, MemfdPool.create, make_cuda_local, make_cuda_ipc]


@pytest.fixture(
    params=MAKERS, ids=["local", "memfd", "mapping", "cuda local", "cuda ipc", "cuda mapping"]
)
def pool(request: pytest.FixtureRequest, layout: KVLayout) -> Iterator[KVPool]:
    """Each kind of pool in turn."""
    pool = request.param(layout)
    yield pool
    pool.close()


def test_a_pool_is_one_tensor_of_its_layout(pool: KVPool, layout: KVLayout) -> None:
    """Block-major and without gaps: a block is one run of bytes."""
    assert pool.layout == layout
    assert pool.kv.shape == layout.shape
    assert pool.kv.dtype == torch.float32
    assert pool.kv.is_contiguous()
    assert pool.kv[1].data_ptr() - pool.kv[0].data_ptr() == layout.block_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_every_element_type_comes_out_as_asked(
    maker: Maker, dtype: DTypeName, layout: KVLayout
) -> None:
    """The type is never guessed from the bytes."""
    pool = maker(dataclasses.replace(layout, dtype=dtype))
    assert pool.kv.dtype == TORCH_DTYPES[dtype]
    assert pool.kv.element_size() == pool.layout.item_bytes
    pool.close()


@pytest.mark.parametrize("maker", WRITABLE)
def test_what_is_written_stays(maker: Maker, layout: KVLayout) -> None:
    """Every block is memory of its own, the first and the last included."""
    pool = maker(layout)
    for block in range(layout.num_blocks):
        pool.kv[block] = float(block)
    for block in range(layout.num_blocks):
        assert (pool.kv[block] == block).all()
    pool.close()


@pytest.mark.parametrize("maker", WRITABLE)
def test_a_pool_can_be_made_poisonous(maker: Callable[..., KVPool], layout: KVLayout) -> None:
    """Filled with NaN, it shows whoever reads what was never written."""
    pool = maker(layout, fill=math.nan)
    assert pool.kv.isnan().all()
    pool.close()


def test_a_closed_pool_hands_out_nothing(pool: KVPool) -> None:
    """A named error instead of a read through a dangling pointer."""
    pool.close()
    with pytest.raises(PoolClosedError, match="is closed"):
        _ = pool.kv
    pool.close()


def test_a_pool_stays_mapped_while_a_view_lives(pool: KVPool) -> None:
    """Unmapping would turn the view's next read into a crash of the daemon."""
    view = pool.kv[1, 0]
    with pytest.raises(PoolInUseError, match="drop them first"):
        pool.close()
    assert view.sum() == 0.0
    with pytest.raises(PoolClosedError, match="is closed"):
        _ = pool.kv
    del view
    pool.close()


def test_a_local_pool_becomes_resident_only_where_it_is_written() -> None:
    """A pool is sized for the worst day and costs what the day costs."""
    layout = KVLayout(
        num_blocks=1024, num_layers=8, num_kv_heads=8, block_size=16, head_dim=64, dtype="float32"
    )
    before_bytes = resident_bytes()
    pool = LocalPool(layout)
    pool.kv[:8] = 1.0
    assert resident_bytes() - before_bytes < layout.pool_bytes // 8
    pool.close()


def test_a_local_pool_that_can_never_fit_is_refused(layout: KVLayout) -> None:
    """Linux would promise the memory and kill somebody later."""
    with pytest.raises(PoolAllocationError, match="bytes of memory are available"):
        LocalPool(layout.with_num_blocks(1 << 30))


def resident_bytes() -> int:
    """Return how much memory this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
