"""Who decodes next, and what room is left for more: continuous batching.  Pure.

Every started sequence takes part in every step, in the order of adoption; a new one joins at the
next step and a finished one leaves at once.  A sequence has the blocks that its tokens fill, and
one for the next token: it gets another when it needs it.

Where no block is free, the sequence that was adopted last makes room: its blocks are copied to the
arena (`swap_book.py`) and it comes back, oldest first, when there is room again.  The oldest is
never chosen, so whatever was adopted also finishes.  Who waits for a block sits out steps
meanwhile.  Where the arena is full, it is given up (`dropped`), and its client asks again.

Room.  What is told to prefilld leaves a block for each sequence that runs or is about to, so that
their growth does not at once undo what was let in; and it is nothing while somebody is swapped out:
what was adopted first comes first.  `reserve` itself does not insist on those spare blocks.
Several hand-offs may be on their way under one word of ours; each makes the spare blocks one more,
and were they held against it, the last would be rejected for nothing.

A step may be launched before the one before it is looked at, so a sequence can end, or be moved
out, while steps that write its blocks are in flight; those blocks are touched when the last of
these is collected.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Generic, TypeVar

from decoded.credits import Room
from decoded.schedulable import Schedulable
from decoded.swap_book import AfterCopy, BlockSwap, SwapBook

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.kv.allocator import BlockAllocator

S = TypeVar("S", bound=Schedulable)


class Scheduler(Generic[S]):
    """The running batch, the places reserved beside it, and who waits outside.

    Args:
        allocator: decoded's own pool; the scheduler and its book of swaps alone allocate from it
            and free into it.
        max_batch: Sequences that may be reserved, running or swapped together; at least 1.
        arena: The places in host memory for sequences that make room; None where there are none.
    """

    def __init__(
        self, *, allocator: BlockAllocator, max_batch: int, arena: BlockAllocator | None = None
    ) -> None:
        self._allocator = allocator
        self._max_batch = max_batch
        self._num_reserved = 0
        self._running: list[S] = []
        """In the order of adoption."""
        self._swaps: SwapBook[S] = SwapBook(pool=allocator, arena=arena)
        self._leaving: list[S] = []
        """Finished sequences that steps in flight still write."""
        self._preempted: list[S] = []
        self._dropped: list[S] = []
        self.on_left: Callable[[S], None] = lambda _: None
        """Called when a finished sequence's blocks are free: no step reads or writes for it."""

    # --- what others may know ------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks that one sequence can have at most."""
        return self._allocator.num_blocks - 1

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_reserved(self) -> int:
        """Places promised to sequences whose blocks are still being pulled."""
        return self._num_reserved

    @property
    def swapped(self) -> tuple[S, ...]:
        """Sequences that made room for others and are not back."""
        return self._swaps.sequences

    def is_swapped(self, sequence: S) -> bool:
        """Whether a sequence made room for others and is not back."""
        return sequence in self._swaps

    @property
    def room(self) -> Room:
        """What prefilld may be told of: spare blocks are left out."""
        num_active = self._num_reserved + len(self._running)
        free_blocks = max(0, self._allocator.num_free - num_active)
        return Room(
            free_blocks=0 if self._swaps else free_blocks,
            free_sequences=self._max_batch - num_active - len(self._swaps),
        )

    # --- room for new ones ---------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks and a place in the batch, or nothing where either lacks."""
        if self._swaps or self.room.free_sequences < 1 or self._allocator.num_free < num_blocks:
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
        self._run(sequence)

    def finish(self, sequence: S) -> None:
        """Take a started sequence out, and free its blocks as soon as nothing touches them."""
        if sequence in self._swaps:
            if not self._swaps.end(sequence):
                return  # `swap_done` will
        elif sequence in self._dropped:
            self._dropped.remove(sequence)
        else:
            self._running.remove(sequence)
        if sequence.num_in_flight:
            self._leaving.append(sequence)
        else:
            self._leave(sequence)

    # --- steps -----------------------------------------------------------------------------------

    def next_batch(self) -> list[S]:
        """Return the sequences of the next step, oldest first, each with a place for its token.

        Afterwards `take_preempted` and `dropped` tell who had to make room.
        """
        batch: list[S] = []
        num_short = index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            if not sequence.wants_step:
                continue
            if sequence.lacks_slot:
                if not self._allocator.num_free:
                    num_short += 1
                    if self._make_room(index - 1, num_short):
                        num_short, index = num_short - 1, index - 1
                    continue
                sequence.extend(self._allocator.allocate(1)[0])
            batch.append(sequence)
        return batch

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

    # --- who makes room ------------------------------------------------------------------------

    def take_preempted(self) -> list[S]:
        """Return the sequences that were sent to the arena since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    @property
    def dropped(self) -> tuple[S, ...]:
        """Sequences for which there is no room anywhere; each is to be ended.

        They are out of the batch; `finish` frees their blocks, and then a next batch may differ.
        """
        return tuple(self._dropped)

    def next_swaps(self, max_blocks: int) -> list[BlockSwap[S]]:
        """Choose what to copy to the arena and back, `max_blocks` in all.

        Who comes back leaves room for those who run to grow; alone it needs none.
        """
        while (candidate := self._swaps.next_back()) is not None:
            sequence, num_blocks = candidate
            num_active = self._num_reserved + len(self._running) + self._swaps.num_returning
            num_spare = num_active + 1 if num_active else 0
            if self._allocator.num_free < num_blocks + num_spare:
                break
            self._swaps.bring_back(sequence, self._allocator.allocate(num_blocks))
        return self._swaps.next_copies(max_blocks)

    def swap_done(self, copy: BlockSwap[S]) -> AfterCopy:
        """A copy of `next_swaps` is over; a sequence that is back joins the next step."""
        after = self._swaps.copied(copy)
        if after is AfterCopy.IS_BACK:
            self._run(copy.sequence)
        elif after is AfterCopy.HAS_ENDED:
            self._leave(copy.sequence)  # no step was in flight, or it could not be copied
        return after

    # --- blocks beside the batch -----------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks for a sequence that runs already, or none where they lack."""
        if self._allocator.num_free < num_blocks:
            return None
        return self._allocator.allocate(num_blocks)

    def free(self, blocks: list[int]) -> None:
        """Give back what `allocate` took and no sequence has."""
        self._allocator.free(blocks)

    def move_out(self, sequence: S, num_blocks: int) -> list[int] | None:
        """Send a sequence to the arena with `num_blocks` blocks that it has elsewhere.

        Returns:
            Places in the arena for those, or None where the arena has no room for all of it.  The
            sequence stays out until `moved_out`, or until it is finished.
        """
        is_running = sequence not in self._swaps
        if not self._swaps.has_room(num_blocks + (len(sequence.blocks) if is_running else 0)):
            return None
        if is_running:
            self._preempt(sequence)
        self._swaps.hold(sequence)
        return self._swaps.take(num_blocks)

    def moved_out(self, sequence: S, places: list[int]) -> None:
        """What a sequence had elsewhere is in the places that `move_out` gave."""
        self._swaps.join(sequence, places)

    def free_places(self, places: list[int]) -> None:
        """Give back what `move_out` gave, where the sequence ended before it was used."""
        self._swaps.give_back(places)

    # --- inner ---------------------------------------------------------------------------------

    def _run(self, sequence: S) -> None:
        insort(self._running, sequence, key=lambda each: each.adopted_ns)

    def _make_room(self, index: int, num_short: int) -> bool:
        """Preempt until `num_short` blocks will come free: who is at `index` lacks one of them.

        Nobody makes room for a younger one, and the oldest for nobody.  Returns whether it was the
        one at `index` itself that had to go.
        """
        needy = self._running[index]
        while self._num_coming < num_short:
            if len(needy.blocks) == self.capacity:
                self._drop(needy)  # nobody is left to make room for it
                return True
            candidates = [each for each in self._running[max(1, index) :] if not each.is_moving]
            if not candidates:
                return False
            fitting = (
                each for each in reversed(candidates) if self._swaps.has_room(len(each.blocks))
            )
            victim = next(fitting, None)
            if victim is not None:
                self._preempt(victim)
            else:
                self._drop(victim := candidates[-1])
            if victim is needy:
                return True
        return False

    @property
    def _num_coming(self) -> int:
        """Blocks that will be free without further doing."""
        going = (*self._leaving, *self._dropped)
        return self._swaps.num_coming + sum(len(sequence.blocks) for sequence in going)

    def _drop(self, sequence: S) -> None:
        self._running.remove(sequence)
        self._dropped.append(sequence)

    def _preempt(self, sequence: S) -> None:
        self._running.remove(sequence)
        self._swaps.add(sequence)
        self._preempted.append(sequence)

    def _leave(self, sequence: S) -> None:
        self._allocator.free(sequence.blocks)
        self.on_left(sequence)
