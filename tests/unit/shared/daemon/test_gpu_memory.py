"""A daemon's part of a GPU's memory, of GPUs that are only described."""

from __future__ import annotations

import pytest

from shared.daemon.gpu_memory import GpuMemory, blocks_that_fit, weights_refusal
from shared.errors import ExitCode
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
    [(7 * GIB, ExitCode.CONFIG, "a smaller model"), (3 * GIB, ExitCode.BUSY, "who holds the rest")],
)
def test_weights_that_do_not_fit_are_told_by_who_has_the_room(
    ours: int, exit_code: ExitCode, hint: str
) -> None:
    """Beside a process that ends they fit in a moment; on a GPU that is too small they never do."""
    refusal = weights_refusal(GpuMemory(free=GIB // 1024, total=int(7.2 * GIB), ours=ours))
    assert refusal.exit_code is exit_code
    assert "the model's weights do not fit the GPU: 1048576 of its" in str(refusal)
    assert hint in str(refusal)
