"""Host memory whose blocks are like a pool's: where sequences wait that make room for others.

On a CPU it is memory that becomes resident as it is written; on a GPU it is pinned, taken at once
and for good, so that the GPU copies to it and from it by itself.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.errors import CudaCallError, GpuFatalError, PoolAllocationError
from shared.kv.layout import RESERVED_BLOCK
from shared.kv.memory import available_bytes
from shared.kv.pool import LocalPool, MappedPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.kv.cuda_runtime import CudaRuntime
    from shared.kv.layout import KVLayout

GIB = 1 << 30

MEMORY_SHARE = 2
"""An arena takes one part in so many of what the machine could still hold, at most: kernel, process
and neighbours need memory as well, and of a control group only the limit is known."""


def arena_layout(
    pool: KVLayout, *, max_bytes: int, read_available: Callable[[], int | None] = available_bytes
) -> KVLayout | None:
    """Return the layout of an arena beside a pool, or None where it would hold nothing.

    Never more blocks than the pool: the sequences that are out were in it.  Nor more than half of
    what the machine could still hold: memory that is promised and not there would end with somebody
    killed.

    Args:
        pool: The pool's.
        max_bytes: What the arena may take.
        read_available: Returns how much memory is left, or None where nobody tells.  A pool on the
            same machine may not be resident yet, and is left room for by whoever asks.
    """
    available = read_available()
    num_bytes = (
        max_bytes if available is None else min(max_bytes, max(0, available) // MEMORY_SHARE)
    )
    num_blocks = min(num_bytes // pool.block_bytes, pool.num_blocks - 1 - RESERVED_BLOCK)
    if num_blocks < 1:
        return None
    return pool.with_num_blocks(num_blocks + RESERVED_BLOCK + 1)


def local_arena(pool: KVLayout, *, max_bytes: int) -> LocalPool | None:
    """Return the arena of a daemon on the CPU, or None where there is no room for a block.

    Args:
        pool: The layout of its pool, which is allocated and need not be resident.
        max_bytes: What the arena may take.
    """

    def left() -> int | None:
        available = available_bytes()
        return None if available is None else available - pool.pool_bytes

    layout = arena_layout(pool, max_bytes=max_bytes, read_available=left)
    return None if layout is None else LocalPool(layout)


def pinned_arena(
    pool: KVLayout, *, max_bytes: int, runtime: CudaRuntime | None = None
) -> PinnedArena | str | None:
    """Return the arena of a daemon on a GPU, or why there is none; None where it has no room.

    Without it answers that must make room break off, which is no reason not to serve at all.

    Args:
        pool: The layout of its pool.
        max_bytes: What the arena may take.
        runtime: CUDA; None loads it.

    Raises:
        GpuFatalError: The GPU is lost.
    """
    try:
        return PinnedArena.create(pool, max_bytes=max_bytes, runtime=runtime)
    except GpuFatalError:
        raise
    except (CudaCallError, PoolAllocationError) as error:
        return str(error)


class PinnedArena(MappedPool):
    """The arena of a daemon on a GPU.

    Making it takes the kernel the time to find and clear all of its memory, 1.3 s for
    4 GiB; nothing is taken later.  Every call belongs on the engine thread.
    """

    def __init__(self, layout: KVLayout, mapping: mmap.mmap, runtime: CudaRuntime) -> None:
        """Take over memory that is not pinned yet; `create` makes it."""
        super().__init__(layout, mapping, what="the arena")
        self._runtime = runtime
        self._address: int | None = self.kv.data_ptr()
        runtime.pin(self._address, layout.pool_bytes)

    @classmethod
    def create(
        cls, pool: KVLayout, *, max_bytes: int, runtime: CudaRuntime | None = None
    ) -> PinnedArena | None:
        """Return an arena for a pool on a GPU, or None where there is no room for a block.

        Args:
            pool: The pool's layout.
            max_bytes: What the arena may take.
            runtime: CUDA; None loads it.

        Raises:
            PoolAllocationError: The memory was there and could not be taken.
            CudaCallError: It could not be pinned.
        """
        layout = arena_layout(pool, max_bytes=max_bytes)
        if layout is None:
            return None
        num_bytes = layout.pool_bytes
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PoolAllocationError(num_bytes=num_bytes, reason=str(error)) from error
        return cls(layout, mapping, runtime or CupyRuntime.load())

    def close(self) -> None:
        """Give the memory back; copies to it and from it must have ended.

        Raises:
            PoolInUseError: A tensor still looks into it; see `KVPool.close`.
            CudaCallError: CUDA failed.
        """
        if self._address is not None:
            address, self._address = self._address, None
            self._runtime.unpin(address)
        super().close()
