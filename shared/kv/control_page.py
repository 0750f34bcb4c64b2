"""The fence between the daemons: one generation a lease slot, written by prefilld alone.

A lease names its slot and a generation.  decoded may use what it read under that lease only if the
page holds that generation before the read and still holds it after.  prefilld publishes another
one before any block of the lease may be written again, so it can take a lease back at any time,
from a peer that is slow, stopped or gone, without waiting for anybody.

A generation is one aligned 8-byte word, which x86-64 and AArch64 load and store whole; the
memoryview moves it in one instruction.  x86-64 also keeps the order of the stores, and of the
loads, around it.  AArch64 does not promise that, but between a word and the blocks it guards lie
a hand-over between threads and thousands of instructions of interpreter.
"""

from __future__ import annotations

import mmap
import os

from shared.kv.errors import GenerationError, PoolClosedError, UnknownSlotError
from shared.kv.sealed_memfd import create_sealed, map_sealed

SLOT_BYTES = 8
"""A generation is a u64."""


class _Page:
    """What the writer and the reader of a control page share."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # Released by `close`, and then refuses every access by itself.
        self._generations = memoryview(mapping).cast("Q")
        self._num_slots = len(self._generations)

    @property
    def num_slots(self) -> int:
        """Slots on the page."""
        return self._num_slots

    def read(self, slot: int) -> int:
        """Return the generation that a slot holds now; 0 before the first lease.

        Raises:
            UnknownSlotError: The page has no such slot.
            PoolClosedError: The page is closed.
        """
        if not 0 <= slot < self._num_slots:
            raise UnknownSlotError(slot=slot, num_slots=self._num_slots)
        if self._mapping.closed:
            raise PoolClosedError(what="the control page")
        return self._generations[slot]

    def close(self) -> None:
        """Unmap the page; a second call does nothing."""
        self._generations.release()
        self._mapping.close()


class ControlPage(_Page):
    """prefilld's side: the only one that can write."""

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        """Take over a writable mapping and its descriptor; `create` makes both."""
        super().__init__(mapping)
        self._fd: int | None = fd

    @classmethod
    def create(cls, num_slots: int) -> ControlPage:
        """Make a page on which every slot holds 0, which no lease ever has.

        Raises:
            PoolAllocationError: There is no room, or the kernel lacks memfd or its seals.
        """
        fd, mapping = create_sealed("kvpair-control", num_slots * SLOT_BYTES)
        return cls(mapping, fd)

    def publish(self, slot: int, generation: int) -> None:
        """Make a slot hold a generation; whoever reads under an earlier one is fenced off.

        To be called before a block of the earlier lease is freed, moved or written.

        Raises:
            UnknownSlotError: The page has no such slot.
            GenerationError: The generation is not larger than the one that the slot holds.
            PoolClosedError: The page is closed.
        """
        current = self.read(slot)
        if generation <= current:
            raise GenerationError(slot=slot, current=current, generation=generation)
        self._generations[slot] = generation

    def export(self) -> int:
        """Return a new descriptor of the page, close-on-exec, for the caller to send and close.

        Raises:
            PoolClosedError: The page is closed.
        """
        if self._fd is None:
            raise PoolClosedError(what="the control page")
        return os.dup(self._fd)

    def close(self) -> None:
        """Unmap the page and drop the descriptor; a peer's mapping of it lives on."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)
        super().close()


class ControlPageView(_Page):
    """decoded's side: reads only, and the kernel sees to it."""

    @classmethod
    def open(cls, fd: int, num_slots: int) -> ControlPageView:
        """Map a page that came as a descriptor, which stays the caller's to close.

        Raises:
            PoolMappingError: The descriptor is no memfd, lacks a seal, or has another size
                than `num_slots` slots.
        """
        return cls(map_sealed(fd, num_slots * SLOT_BYTES, what="the control page"))
