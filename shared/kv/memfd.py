"""The KV pool on a machine without a GPU: a sealed memfd that prefilld writes and decoded reads."""

from __future__ import annotations

import mmap
import os

from shared.kv.errors import MappingFault, PoolClosedError, PoolMappingError
from shared.kv.layout import KVLayout
from shared.kv.pool import MappedPool
from shared.kv.sealed_memfd import create_sealed, map_sealed


class MemfdPool(MappedPool):
    """prefilld's pool: its own memory, which others may map for reading."""

    def __init__(self, layout: KVLayout, mapping: mmap.mmap, fd: int) -> None:
        """Take over a writable mapping and its descriptor; `create` makes both."""
        super().__init__(layout, mapping, what="the pool")
        self._fd: int | None = fd

    @classmethod
    def create(cls, layout: KVLayout, *, fill: float | None = None) -> MemfdPool:
        """Allocate the whole pool at once (see `create_sealed` for what that costs).

        Args:
            layout: The pool's shape.
            fill: Write this number everywhere.  Tests fill pools with NaN to show that what
                was never written is never read.

        Raises:
            PoolAllocationError: There is no room, or the kernel lacks memfd or its seals.
        """
        fd, mapping = create_sealed("kvpair-pool", layout.pool_bytes)
        pool = cls(layout, mapping, fd)
        if fill is not None:
            pool.kv.fill_(fill)
        return pool

    def export(self) -> int:
        """Return a new descriptor of the pool, close-on-exec, for the caller to send and close.

        It is the right to read every prompt in the pool: never log it, and send it to nobody
        who has not been identified.

        Raises:
            PoolClosedError: The pool is closed.
        """
        if self._fd is None:
            raise PoolClosedError(what="the pool")
        return os.dup(self._fd)

    def close(self) -> None:
        """Unmap the pool and drop the descriptor; a peer's mapping of it lives on.

        Raises:
            PoolInUseError: A tensor still looks into the pool; see `KVPool.close`.
        """
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        super().close()


class MemfdMapping(MappedPool):
    """decoded's view of prefilld's pool.  Its tensor is read-only: writing it is a SIGSEGV."""

    @classmethod
    def open(cls, fd: int, layout: KVLayout, expected_bytes: int) -> MemfdMapping:
        """Map a pool that came as a descriptor.

        Args:
            fd: The descriptor; it stays the caller's, who may close it at once.
            layout: What the pool is believed to be, its number of blocks included.
            expected_bytes: The size that the peer announced.

        Raises:
            PoolMappingError: The descriptor is no memfd, lacks a seal, is not as large as
                announced or as the layout needs, or cannot be mapped.
        """
        if expected_bytes != layout.pool_bytes:
            raise PoolMappingError(
                fault=MappingFault.SIZE,
                message=f"the pool was announced with {expected_bytes} bytes; "
                f"{layout.num_blocks} blocks of this layout take {layout.pool_bytes}",
            )
        mapping = map_sealed(fd, expected_bytes, what="the pool")
        return cls(layout, mapping, what="the peer's pool")
