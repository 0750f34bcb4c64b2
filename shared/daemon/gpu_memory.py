"""How much of a GPU's memory a daemon gets: room for its weights, and a share for its pool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import torch

from shared.errors import EnvironmentUnsupportedError, MemoryShortageError
from shared.kv.cuda_foreign import GpuMemory, holders, is_shortage, look
from shared.kv.errors import CudaCallError
from shared.kv.memory import blocks_from_memory
from shared.kv.patience import PATIENCE_S, settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.kv.layout import KVLayout

OTHERS_SHARE = 0.05
"""Of the GPU's memory: what others hold above it may be what is missing; the driver's own part and
this process's context stay below it."""

T = TypeVar("T")

MAX_LOADS = 3
"""Of one start: memory of two other processes may come back one after the other."""

QUIET_S = 2.0
"""How long nothing must have come back before weights that did not fit are given up: twice what
the other daemon takes to let go of a dead one's pool."""


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


def load_as_memory_comes_back(
    load: Callable[[], T],
    *,
    look: Callable[[], GpuMemory] = look,
    holders: Callable[[], str] = holders,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return what `load` brought to the GPU; tried again while a process that ends lets go of it.

    Args:
        load: Loads the weights.
        look: Asks about the memory.
        holders: Says who has it.
        sleep: Waits.

    Raises:
        EnvironmentUnsupportedError: The weights do not fit the GPU.
        MemoryShortageError: The same, for others hold its memory.
    """
    num_loads = 0
    while True:
        num_loads += 1
        try:
            return load()
        except (RuntimeError, CudaCallError) as error:
            if not is_shortage(error):
                raise
            memory = look()
        # The exception held what was loaded by then; now it is nobody's, and can be given back.
        torch.cuda.empty_cache()
        free = settled(lambda: look().free, patience_s=PATIENCE_S, quiet_s=QUIET_S, sleep=sleep)
        if free <= memory.free + memory.ours or num_loads == MAX_LOADS:
            raise weights_refusal(memory, holders=holders)


def weights_refusal(
    memory: GpuMemory, *, holders: Callable[[], str]
) -> EnvironmentUnsupportedError | MemoryShortageError:
    """Return what is told where a model's weights found no room.

    Args:
        memory: As it is then.
        holders: Says who has it.
    """
    fault = (
        f"the model's weights do not fit the GPU: {memory.free} of its {memory.total} bytes are "
        f"free, {memory.ours} are the weights' so far"
    )
    others = memory.total - memory.free - memory.ours
    if others > memory.total * OTHERS_SHARE:
        return MemoryShortageError(fault, hint=holders())
    return EnvironmentUnsupportedError(
        fault, hint="choose a smaller model, another model.dtype, or a larger GPU"
    )
