"""How much of a GPU's memory a daemon gets: room for its weights, and a share for its pool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from shared.errors import EnvironmentUnsupportedError, MemoryShortageError
from shared.kv.memory import blocks_from_memory
from shared.kv.patience import settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.kv.layout import KVLayout

OTHERS_SHARE = 0.05
"""Of the GPU's memory: what others hold above it may be what is missing; the driver's own part and
this process's context stay below it."""


class GpuMemory(NamedTuple):
    """The current GPU's, in bytes."""

    free: int
    total: int
    ours: int
    """What torch has taken for this process."""


def look() -> GpuMemory:
    """Ask the driver and torch about the current GPU."""
    free, total = torch.cuda.mem_get_info()
    return GpuMemory(free=free, total=total, ours=torch.cuda.memory_reserved())


def blocks_that_fit(
    layout: KVLayout,
    fraction: float,
    *,
    needed_bytes: int = 0,
    look: Callable[[], GpuMemory] = look,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Return how many blocks a share of the free memory holds, once no more of it comes back.

    Measured while a daemon that was killed is torn down, it would be a part of what there is, and
    the pool would stay that small.

    Args:
        layout: What a block is.
        fraction: The share, of all memory.
        needed_bytes: What is to stay free beside the pool.
        look: Asks about the memory.
        sleep: Waits.

    Raises:
        PoolShortageError: Too little is free, for others hold it.
        PoolAllocationError: The share is too small.
    """
    free_bytes = settled(lambda: look().free, sleep=sleep)
    return blocks_from_memory(
        free_bytes=max(0, free_bytes - needed_bytes),
        total_bytes=look().total,
        fraction=fraction,
        block_bytes=layout.block_bytes,
    )


def weights_refusal(memory: GpuMemory) -> EnvironmentUnsupportedError | MemoryShortageError:
    """Return what is told where a model's weights found no room.

    Args:
        memory: As it is then.
    """
    fault = (
        f"the model's weights do not fit the GPU: {memory.free} of its {memory.total} bytes are "
        f"free, {memory.ours} are the weights' so far"
    )
    others = memory.total - memory.free - memory.ours
    if others > memory.total * OTHERS_SHARE:
        return MemoryShortageError(fault, hint="nvidia-smi tells who holds the rest")
    return EnvironmentUnsupportedError(
        fault, hint="choose a smaller model, another model.dtype, or a larger GPU"
    )
