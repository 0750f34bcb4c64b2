"""What a KV pool is to those who compute with it, and the pool that a daemon keeps to itself."""

from __future__ import annotations

import mmap
import traceback
import warnings
from typing import Protocol

import torch
from torch import Tensor

from shared.kv.errors import PoolAllocationError, PoolClosedError, PoolInUseError
from shared.kv.layout import KVLayout
from shared.kv.memory import require_available

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The layouts' names of element types as torch knows them."""


class KVPool(Protocol):
    """Blocks of keys and values, seen as one tensor."""

    @property
    def layout(self) -> KVLayout:
        """The pool's shape and element type."""

    @property
    def kv(self) -> Tensor:
        """The pool's memory: `layout.shape`, `layout.dtype`.

        Through the mapping of a peer's pool it must not be written: the kernel answers with
        SIGSEGV.  Views of it must be gone before `close`.

        Raises:
            PoolClosedError: The pool is closed.
        """

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Work that still reads or writes the pool must have ended.

        Raises:
            PoolInUseError: A tensor still looks into the pool.  `kv` is refused from now on, the
                memory stays valid for that tensor, and `close` may be called again.
        """


class MappedPool:
    """A pool over mapped memory; the base of the three kinds that a CPU has."""

    def __init__(self, layout: KVLayout, mapping: mmap.mmap, *, what: str) -> None:
        """Take over `mapping`, which has at least `layout.kv_bytes` bytes.

        `what` is the pool's name in error messages.
        """
        self._layout = layout
        self._what = what
        self._mapping = mapping
        self._kv: Tensor | None = _tensor_over(mapping, layout)

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
        """Unmap the memory; see `KVPool.close`."""
        self._kv = None
        try:
            self._mapping.close()
        except BufferError as error:
            raise PoolInUseError(what=self._what) from error


class LocalPool(MappedPool):
    """A pool in this process's own memory, on the CPU.

    Its memory becomes resident where it is first written, which makes that one write several times
    slower.  Huge pages would not help: scattered blocks fill whole ones with zeros for their sake.
    """

    def __init__(self, layout: KVLayout, *, fill: float | None = None) -> None:
        """Reserve the memory.

        Args:
            layout: The pool's shape.
            fill: Write this number everywhere.  Tests fill pools with NaN to show that what
                was never written is never read.

        Raises:
            PoolAllocationError: There is no room.
        """
        num_bytes = layout.pool_bytes
        require_available(num_bytes)
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PoolAllocationError(num_bytes=num_bytes, reason=str(error)) from error
        super().__init__(layout, mapping, what="the local pool")
        if fill is not None:
            self.kv.fill_(fill)


def _tensor_over(mapping: mmap.mmap, layout: KVLayout) -> Tensor:
    """Return the tensor of the layout's shape over a mapping's leading bytes.

    The memoryview matters: torch releases the buffer it was given at once and keeps only the
    object, so over the bare mmap nothing would stop `close` from unmapping a live tensor.
    """
    with warnings.catch_warnings():
        # The tensor of a read-only mapping must not be written, and torch cannot enforce it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(
            memoryview(mapping)[: layout.kv_bytes], dtype=TORCH_DTYPES[layout.dtype]
        )
    return flat.view(layout.shape)


def drop_views(error: BaseException | None) -> None:
    """Drop what the frames of a failure hold.

    A tensor among it that looks into a pool would keep that mapped for as long as anybody has the
    exception: until the next garbage collection, for what has been through a future.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
