"""Who decodes next, and what room is left for more: continuous batching.  Pure.

Every started sequence takes part in every step, in the order in which they started; a new one
joins at the next step and a finished one leaves at once.  Room is promised before it is used:
`reserve` takes the blocks of a whole sequence, prompt and longest answer, together with a place
in the batch, so that whatever was adopted can also finish.  There is no preemption.

A step may be launched before the one before it is looked at, so a sequence can end while steps
that write its blocks are in flight; those blocks are free when the last of these is collected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.kv.allocator import BlockAllocator


class Schedulable(Protocol):
    """What the scheduler must know of a sequence."""

    num_in_flight: int
    """Steps that are launched and not collected; the scheduler alone counts them."""

    @property
    def blocks(self) -> list[int]:
        """The blocks that were reserved for it, prompt first."""

    @property
    def wants_step(self) -> bool:
        """Whether it has tokens left to launch a step for."""


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What may still be reserved."""

    free_blocks: int
    free_sequences: int


class Scheduler(Generic[S]):
    """The running batch and the places reserved beside it.

    Args:
        allocator: decoded's own pool; the scheduler alone allocates from it and frees into it.
        max_batch: Sequences that may be reserved or running together; at least 1.
    """

    def __init__(self, *, allocator: BlockAllocator, max_batch: int) -> None:
        self._allocator = allocator
        self._max_batch = max_batch
        self._num_reserved = 0
        self._running: list[S] = []
        self.on_left: Callable[[S], None] = _ignore
        """Called when a finished sequence's blocks are free: no step reads or writes for it."""
        self._leaving: list[S] = []
        """Finished sequences that steps in flight still write."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Places promised to sequences whose blocks are still being pulled."""
        return self._num_reserved

    @property
    def room(self) -> Room:
        """What may still be reserved."""
        return Room(
            free_blocks=self._allocator.counts().free,
            free_sequences=self._max_batch - self._num_reserved - len(self._running),
        )

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks and a place in the batch, or nothing where either lacks."""
        room = self.room
        if room.free_sequences < 1 or room.free_blocks < num_blocks:
            return None
        self._num_reserved += 1
        return self._allocator.allocate(num_blocks)

    def unreserve(self, blocks: list[int]) -> None:
        """Give back what `reserve` took, where no sequence started on it."""
        self._allocator.free(blocks)
        self._num_reserved -= 1

    def start(self, sequence: S) -> None:
        """Turn a reservation into a running sequence."""
        self._num_reserved -= 1
        self._running.append(sequence)

    def finish(self, sequence: S) -> None:
        """Take a sequence out of the batch, and free its blocks as soon as no step writes them."""
        self._running.remove(sequence)
        if sequence.num_in_flight:
            self._leaving.append(sequence)
        else:
            self._leave(sequence)

    def next_batch(self) -> list[S]:
        """Return the sequences of the next step, oldest first."""
        return [sequence for sequence in self._running if sequence.wants_step]

    def launched(self, batch: list[S]) -> None:
        """A step for these sequences begins."""
        for sequence in batch:
            sequence.num_in_flight += 1

    def collected(self, batch: list[S]) -> None:
        """The oldest step in flight is done; it was launched for these sequences."""
        for sequence in batch:
            sequence.num_in_flight -= 1
            if not sequence.num_in_flight and sequence in self._leaving:
                self._leaving.remove(sequence)
                self._leave(sequence)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks for a sequence that runs already, or none where they lack."""
        if self._allocator.counts().free < num_blocks:
            return None
        return self._allocator.allocate(num_blocks)

    def free(self, blocks: list[int]) -> None:
        """Give back what `allocate` took and no sequence has."""
        self._allocator.free(blocks)

    def _leave(self, sequence: S) -> None:
        self._allocator.free(sequence.blocks)
        self.on_left(sequence)


def _ignore(_: object) -> None:
    pass
