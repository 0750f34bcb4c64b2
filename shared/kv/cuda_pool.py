"""A pool in a GPU's memory: what every kind does, and the one that a daemon keeps to itself."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.cuda_status import OUT_OF_MEMORY
from shared.kv.errors import (
    CudaCallError,
    PoolAllocationError,
    PoolClosedError,
    PoolInUseError,
    PoolShortageError,
)
from shared.kv.nvml import describe_holders, memory_holders
from shared.kv.patience import PATIENCE_S, wait_for
from shared.kv.pool import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shared.kv.cuda_runtime import CudaRuntime
    from shared.kv.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolMemory:
    """What a pool is made of."""

    layout: KVLayout
    runtime: CudaRuntime
    device: int
    """Index of the GPU in this process."""
    address: int
    """Where the pool begins; `layout.kv_bytes` follow."""
    undo: ExitStack
    """Gives back all that the pool holds.  The pool takes it over, and runs it once, in `close`."""
    fill: float | None = None
    """Written everywhere before anything else."""


class CudaPool:
    """A pool over memory on a GPU; the base of the three kinds that a GPU has.

    Args:
        memory: What it is made of.
        what: The pool's name in error messages.

    Every call belongs on the engine thread.
    """

    def __init__(self, memory: PoolMemory, *, what: str) -> None:
        layout, runtime = memory.layout, memory.runtime
        self._layout, self._runtime, self._what = layout, runtime, what
        view = runtime.view(memory.address, layout.kv_bytes, memory.device)
        self._kv: Tensor | None = view.tensor.view(TORCH_DTYPES[layout.dtype]).view(layout.shape)
        self._watch = view.watch
        if memory.fill is not None:
            self._kv.fill_(memory.fill)
            runtime.synchronize()
        memory.undo.callback(runtime.use_device, memory.device)
        self._undo = memory.undo.pop_all()

    @property
    def layout(self) -> KVLayout:
        """The pool's shape and element type."""
        return self._layout

    @property
    def kv(self) -> Tensor:
        """The pool's memory; see `KVPool.kv`."""
        if self._kv is None:
            raise PoolClosedError(what=self._what)
        return self._kv

    def close(self) -> None:
        """Give the memory back; see `KVPool.close`.

        Raises:
            PoolInUseError: A tensor still looks into the pool; see `KVPool.close`.
            CudaCallError: The GPU failed while giving something back; the rest was tried all the
                same, and nothing is tried twice.

        Streams that use the pool must have been synchronised: the driver does not wait for them.
        """
        self._kv = None
        if self._watch() is not None:
            raise PoolInUseError(what=self._what)
        self._undo.close()


class LocalCudaPool(CudaPool):
    """A pool on a GPU that no other process maps: what decoded pulls into."""

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        *,
        device: int,
        fill: float | None = None,
        patience_s: float = PATIENCE_S,
        runtime: CudaRuntime | None = None,
    ) -> LocalCudaPool:
        """Allocate the whole pool at once, outside of torch's allocator, which it would fragment.

        May wait, while a process that ends lets go of its memory.

        Args:
            layout: The pool's shape.
            device: Index of the GPU in this process.
            fill: Write this number everywhere.  Without it the memory holds whatever it held.
            patience_s: How long to wait for memory that others hold.
            runtime: CUDA; None loads it.

        Raises:
            PoolAllocationError: There is no room.
            CudaCallError: CUDA failed, or is not there.
        """
        runtime = runtime or CupyRuntime.load()
        runtime.use_device(device)
        with ExitStack() as undo:
            memory = PoolMemory(
                layout=layout,
                runtime=runtime,
                device=device,
                address=allocate(runtime, layout, device, undo, patience_s=patience_s),
                undo=undo,
                fill=fill,
            )
            return cls(memory, what="the local pool")


def allocate(
    runtime: CudaRuntime,
    layout: KVLayout,
    device: int,
    undo: ExitStack,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Return the address of new memory for a pool.

    Args:
        runtime: CUDA.
        layout: The pool's shape.
        device: Index of the GPU, which is the current one.
        undo: Gets the call that gives the memory back.
        patience_s: How long a pool that could fit is tried for while others hold the memory.
        sleep: Waits for so many seconds.

    Raises:
        PoolShortageError: Others have the room, and it says who.
        PoolAllocationError: The GPU is too small.
    """
    num_bytes = layout.pool_bytes

    def attempt() -> int | None:
        try:
            return runtime.allocate(num_bytes)
        except CudaCallError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            return None

    could_fit = num_bytes <= runtime.memory().total
    address = wait_for(attempt, patience_s=patience_s if could_fit else 0.0, sleep=sleep)
    if address is None:
        memory = runtime.memory()
        raise (PoolShortageError if could_fit else PoolAllocationError)(
            num_bytes=num_bytes,
            reason=f"{memory.free} of the GPU's {memory.total} bytes are free",
            hint=describe_holders(memory_holders(runtime.uuid(device))),
        )
    undo.callback(runtime.free, address)
    return address
