"""The fence between the daemons: one generation a lease slot, written by prefilld alone.

A lease names its slot and a generation.  decoded may use what it read under that lease only if the
page holds that generation before the read and still holds it after.  prefilld publishes another
one before any block of the lease may be written again, so it can take a lease back at any time,
from a peer that is slow, stopped or gone, without waiting for anybody.

Beside its generation a slot holds the first token of the lease's answer, from the moment when
prefilld's engine knows it: decoded's engine, which looks at the page anyway, can go on from it at
once, while HANDOFF is still on its way between two event loops.

Both are aligned 8-byte words, which x86-64 and AArch64 load and store whole; the
memoryview moves each in one instruction.  x86-64 also keeps the order of the stores, and of the
loads, around it.  AArch64 does not promise that, but between a word and the blocks it guards lie
a hand-over between threads and thousands of instructions of interpreter.
"""

from __future__ import annotations

import mmap
import os

from shared.kv.errors import GenerationError, PoolClosedError, UnknownSlotError
from shared.kv.sealed_memfd import create_sealed, map_sealed

WORDS = 2
"""Of a slot: its generation, and the first token with that generation's lower half above it."""

SLOT_BYTES = 8 * WORDS
"""Each word is a u64."""

_HALF_BITS = 32
_HALF = (1 << _HALF_BITS) - 1


class _Page:
    """What the writer and the reader of a control page share."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # Released by `close`, and then refuses every access by itself.
        self._words = memoryview(mapping).cast("Q")
        self._num_slots = len(self._words) // WORDS

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
        return self._words[self._place_of(slot)]

    def first_token(self, slot: int, generation: int) -> int | None:
        """Return the first token of the lease of that generation; None while it is not known.

        Raises:
            UnknownSlotError: The page has no such slot.
            PoolClosedError: The page is closed.
        """
        word = self._words[self._place_of(slot) + 1]
        if word >> _HALF_BITS != generation & _HALF or not word & _HALF:
            return None
        return (word & _HALF) - 1

    def _place_of(self, slot: int) -> int:
        if not 0 <= slot < self._num_slots:
            raise UnknownSlotError(slot=slot, num_slots=self._num_slots)
        if self._mapping.closed:
            raise PoolClosedError(what="the control page")
        return WORDS * slot

    def close(self) -> None:
        """Unmap the page; a second call does nothing."""
        self._words.release()
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
        self._words[self._place_of(slot)] = generation

    def tell_first_token(self, slot: int, generation: int, token_id: int) -> None:
        """Write down the first token of the lease that a slot was given to.

        A lease that was taken back meanwhile is no harm: whoever reads looks for the token of a
        generation.

        Args:
            slot: The lease's.
            generation: The lease's.
            token_id: At most 2^32 - 2, which no vocabulary reaches.

        Raises:
            UnknownSlotError: The page has no such slot.
            PoolClosedError: The page is closed.
        """
        word = (generation & _HALF) << _HALF_BITS | (token_id + 1)
        self._words[self._place_of(slot) + 1] = word

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
