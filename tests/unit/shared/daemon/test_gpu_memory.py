"""A daemon's part of a GPU's memory, of GPUs that are only described."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from shared.daemon.gpu_memory import (
    MAX_LOADS,
    QUIET_S,
    GpuMemory,
    blocks_that_fit,
    load_as_memory_comes_back,
)
from shared.errors import ExitCode, KvpairError, MemoryShortageError
from shared.kv.errors import PoolAllocationError, PoolShortageError
from shared.kv.layout import KVLayout

GIB = 1 << 30
LAYOUT = KVLayout(
    num_blocks=3, num_layers=4, num_kv_heads=2, block_size=16, head_dim=64, dtype="bfloat16"
)


def no_sleep(_: float) -> None:
    """Time is no part of these tests."""


def test_a_share_is_measured_once_a_dead_predecessor_is_gone() -> None:
    """A third of the GPU came back while the daemon that was killed was torn down."""
    free = [GIB, GIB, 2 * GIB, 3 * GIB]

    def look() -> GpuMemory:
        return GpuMemory(free=free.pop(0) if len(free) > 1 else free[0], total=8 * GIB, ours=0)

    assert blocks_that_fit(LAYOUT, 0.5, look=look, sleep=no_sleep) == 3 * GIB // 2 // (
        LAYOUT.block_bytes
    )


@pytest.mark.parametrize(
    ("fraction", "error"), [(0.5, PoolShortageError), (1e-5, PoolAllocationError)]
)
def test_too_little_is_told_by_whether_others_have_it(
    fraction: float, error: type[PoolAllocationError]
) -> None:
    """A share that is too small by itself is not mended by another start."""
    memory = GpuMemory(free=1 << 16, total=GIB, ours=0)
    with pytest.raises(error, match="is too little") as told:
        blocks_that_fit(LAYOUT, fraction, look=lambda: memory, sleep=no_sleep)
    assert type(told.value) is error


@pytest.mark.parametrize(
    ("ours", "exit_code", "hint"),
    [(7 * GIB, ExitCode.CONFIG, "a smaller model"), (3 * GIB, ExitCode.BUSY, "it is held by X 9")],
)
def test_weights_that_do_not_fit_are_told_by_who_has_the_room(
    ours: int, exit_code: ExitCode, hint: str
) -> None:
    """Beside a process that ends they fit in a moment; on a GPU that is too small they never do."""
    memory = GpuMemory(free=GIB // 1024, total=int(7.2 * GIB), ours=ours)
    pauses: list[float] = []
    with pytest.raises(KvpairError, match="weights do not fit the GPU: 1048576 of its") as refusal:
        load_as_memory_comes_back(
            full, look=lambda: memory, holders=lambda: "it is held by X 9", sleep=pauses.append
        )
    assert refusal.value.exit_code is exit_code
    assert hint in str(refusal.value)
    assert sum(pauses) == pytest.approx(QUIET_S), "it is not loaded again for nothing"


def full() -> str:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def test_weights_are_loaded_again_when_memory_came_back() -> None:
    """A successor that is started at the kill finds a GPU that is still full."""
    free = [GIB, GIB, 5 * GIB]
    num_loads = 0

    def load() -> str:
        nonlocal num_loads
        num_loads += 1
        return full() if num_loads == 1 else "the model"

    def look() -> GpuMemory:
        return GpuMemory(free=free.pop(0) if len(free) > 1 else free[0], total=8 * GIB, ours=GIB)

    assert load_as_memory_comes_back(load, look=look, sleep=no_sleep) == "the model"


def test_weights_are_not_loaded_for_ever() -> None:
    """Another program may take memory and give it back again and again."""
    free, num_loads = count(GIB), 0

    def load() -> str:
        nonlocal num_loads
        num_loads += 1
        return full()

    with pytest.raises(MemoryShortageError, match="it is held by X 9"):
        load_as_memory_comes_back(
            load,
            look=lambda: GpuMemory(free=next(free), total=8 * GIB, ours=0),
            holders=lambda: "it is held by X 9",
            sleep=no_sleep,
        )
    assert num_loads == MAX_LOADS


def test_another_fault_of_loading_is_not_waited_for() -> None:
    """It would be the same in a moment."""
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        load_as_memory_comes_back(
            lambda: (_ for _ in ()).throw(RuntimeError("a shape is wrong")),
            sleep=lambda _: pytest.fail("somebody waited"),
        )
