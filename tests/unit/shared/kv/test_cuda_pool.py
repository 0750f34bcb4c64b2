"""Tests of shared/kv/cuda_pool.py; test_pool.py holds it to what every pool must do."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from shared.errors import ExitCode
from shared.kv.cuda_pool import LocalCudaPool, allocate
from shared.kv.errors import GpuFatalError, PoolAllocationError, PoolShortageError
from shared.kv.layout import KVLayout
from shared.kv.patience import RETRY_S
from tests.support.fake_cuda import FakeCuda, FakeGpus


@pytest.fixture
def gpus(layout: KVLayout) -> FakeGpus:
    """A GPU with room for one pool."""
    return FakeGpus(total_bytes=layout.pool_bytes)


def test_a_pool_waits_for_a_process_that_is_ending(gpus: FakeGpus, layout: KVLayout) -> None:
    """After a crash the old pool is held until the other daemon has let go of it."""
    old = LocalCudaPool.create(layout, device=0, runtime=FakeCuda(gpus))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            old.close()

    with ExitStack() as undo:
        allocate(FakeCuda(gpus), layout, 0, undo, patience_s=1.0, sleep=sleep)
        assert gpus.held_bytes == layout.pool_bytes
    assert gpus.held_bytes == 0
    assert waited == [RETRY_S] * 3


def test_patience_ends_and_says_who_holds_the_memory(gpus: FakeGpus, layout: KVLayout) -> None:
    old = LocalCudaPool.create(layout, device=0, runtime=FakeCuda(gpus))
    waited: list[float] = []
    with pytest.raises(
        PoolShortageError, match=r"0 of the GPU's 2097152 bytes are free; \w+"
    ) as told:
        allocate(
            FakeCuda(gpus), layout, 0, ExitStack(), patience_s=10 * RETRY_S, sleep=waited.append
        )
    assert len(waited) == 10
    assert told.value.exit_code is ExitCode.BUSY, "a service manager tries again"
    old.close()


def test_what_can_never_fit_is_not_waited_for(gpus: FakeGpus, layout: KVLayout) -> None:
    """Ten seconds before a word about a wrong number are lost to whoever typed it."""
    with pytest.raises(
        PoolAllocationError, match="cannot allocate a pool of 4194304 bytes"
    ) as told:
        allocate(FakeCuda(gpus), layout.with_num_blocks(5_000), 0, ExitStack(), sleep=never)
    assert told.value.exit_code is ExitCode.CONFIG, "another start will not mend it"


def test_a_gpu_that_fails_is_not_waited_for(gpus: FakeGpus, layout: KVLayout) -> None:
    runtime = FakeCuda(gpus)
    runtime.fails["allocate"] = 719
    with pytest.raises(GpuFatalError, match="a kernel failed"):
        allocate(runtime, layout, 0, ExitStack(), sleep=never)


def never(_: float) -> None:
    raise AssertionError("it waited")
