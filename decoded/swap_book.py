"""Sequences that were moved out of the pool for the sake of others: where each of them is.  Pure.

            steps in flight   their blocks are copied            their blocks are copied
    running ──► WAITING ──last step collected──► OUT ──► SWAPPED ──room──► IN ──► running
                   │                              │         ▲  │           │
                   │                              │         └──┼─ recalled ┤
                   └──────── ended: at once, or once no copy of it runs ───┴──► (gone)

Whole blocks go to the arena, host memory whose blocks are like the pool's, and come back into
whatever blocks are free then.  Places in the arena are taken when a sequence is chosen, so that
what was begun can be finished; its blocks in the pool are free when the last of them was copied.

What a sequence reads in the peer's pool stays there.  Where that has to be left (`in_place.py`), it
is held: it does not come back before `join` says where those blocks are now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from decoded.schedulable import Swappable

if TYPE_CHECKING:
    from shared.kv.allocator import BlockAllocator


S = TypeVar("S", bound=Swappable)


class SwapState(Enum):
    """Where a sequence stands; see the module's diagram."""

    WAITING = auto()
    OUT = auto()
    SWAPPED = auto()
    IN = auto()


class AfterCopy(Enum):
    """What a copy that is over means for its sequence."""

    GOES_ON = auto()
    """More of it is to be copied."""
    IS_OUT = auto()
    IS_BACK = auto()
    HAS_ENDED = auto()
    """Nothing is copied for it any more, and its places in the arena are free."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSwap(Generic[S]):
    """A bounded run of one sequence's blocks to copy: `sources[i]` to `targets[i]`."""

    sequence: S
    is_out: bool
    """From the pool to the arena; otherwise the other way."""
    sources: list[int]
    targets: list[int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Swap(Generic[S]):
    sequence: S
    places: list[int]
    """In the arena, one for each block."""
    state: SwapState = SwapState.WAITING
    joined: list[int] = field(default_factory=list)
    """Places of blocks that come before those: what was read in the peer's pool."""
    blocks: list[int] = field(default_factory=list)
    """Of the pool, which it comes back into."""
    num_copied: int = 0
    is_copying: bool = False
    is_held: bool = False
    is_recalled: bool = False
    """It was coming back, and must not."""
    is_ending: bool = False


class SwapBook(Generic[S]):
    """All sequences that are not in the batch though they were.

    Args:
        pool: decoded's own pool, which `Scheduler` allocates from as well.
        arena: The places in host memory; None where there are none.
    """

    def __init__(self, *, pool: BlockAllocator, arena: BlockAllocator | None) -> None:
        self._pool, self._arena = pool, arena
        self._swaps: dict[S, _Swap[S]] = {}

    def __len__(self) -> int:
        return len(self._swaps)

    def __contains__(self, sequence: S) -> bool:
        return sequence in self._swaps

    @property
    def sequences(self) -> tuple[S, ...]:
        """The sequences, in the order in which they were chosen."""
        return tuple(self._swaps)

    @property
    def num_coming(self) -> int:
        """Blocks of the pool that will be free without further doing."""
        return sum(
            len(swap.sequence.blocks)
            for swap in self._swaps.values()
            if swap.state in (SwapState.WAITING, SwapState.OUT)
        )

    @property
    def num_returning(self) -> int:
        """Sequences that are on their way back into the pool."""
        return sum(swap.state is SwapState.IN for swap in self._swaps.values())

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks fit the arena."""
        return self._arena is not None and self._arena.num_free >= num_blocks

    def take(self, num_blocks: int) -> list[int]:
        """Take places in the arena, for which there is room."""
        assert self._arena is not None, "`has_room` comes first"
        return self._arena.allocate(num_blocks)

    def give_back(self, places: list[int]) -> None:
        """Give places back that `take` gave and no sequence has."""
        if self._arena is not None:
            self._arena.free(places)

    # --- out -----------------------------------------------------------------------------------

    def add(self, sequence: S) -> None:
        """Move a sequence out that has left the batch and whose blocks fit the arena."""
        places = self.take(len(sequence.blocks))
        self._swaps[sequence] = _Swap(sequence=sequence, places=places)

    def hold(self, sequence: S) -> None:
        """Keep a sequence out until `join`."""
        swap = self._swaps[sequence]
        swap.is_held, swap.is_recalled = True, swap.state is SwapState.IN

    def join(self, sequence: S, places: list[int]) -> None:
        """Blocks that come before a held sequence's own are in these places of the arena now."""
        swap = self._swaps[sequence]
        swap.joined, swap.is_held = places, False

    # --- back ----------------------------------------------------------------------------------

    def next_back(self) -> tuple[S, int] | None:
        """Return who comes back next and how many blocks it has, if it can come back now.

        That is the oldest, and nobody overtakes it.
        """
        staying = [swap for swap in self._swaps.values() if swap.state is not SwapState.IN]
        if not staying:
            return None
        swap = min(staying, key=lambda each: each.sequence.adopted_ns)
        if swap.state is not SwapState.SWAPPED or swap.is_held:
            return None
        return swap.sequence, len(swap.joined) + len(swap.places)

    def bring_back(self, sequence: S, blocks: list[int]) -> None:
        """Begin to move a sequence into these blocks of the pool."""
        swap = self._swaps[sequence]
        swap.state, swap.blocks = SwapState.IN, blocks

    # --- copies --------------------------------------------------------------------------------

    def next_copies(self, max_blocks: int) -> list[BlockSwap[S]]:
        """Choose what to copy next, `max_blocks` in all and one copy for each sequence."""
        copies: list[BlockSwap[S]] = []
        for swap in self._swaps.values():
            if max_blocks == 0:
                break
            if swap.state is SwapState.WAITING and not swap.sequence.num_in_flight:
                swap.state = SwapState.OUT
            if swap.is_copying or swap.state in (SwapState.WAITING, SwapState.SWAPPED):
                continue
            is_out = swap.state is SwapState.OUT
            in_arena = swap.places if is_out else [*swap.joined, *swap.places]
            in_pool = swap.sequence.blocks if is_out else swap.blocks
            part = slice(swap.num_copied, swap.num_copied + max_blocks)
            sources, targets = (in_pool, in_arena) if is_out else (in_arena, in_pool)
            copy = BlockSwap(
                sequence=swap.sequence,
                is_out=is_out,
                sources=sources[part],
                targets=targets[part],
            )
            max_blocks -= len(copy.sources)
            swap.is_copying = True
            copies.append(copy)
        return copies

    def copied(self, copy: BlockSwap[S]) -> AfterCopy:
        """Take note that a copy is over."""
        swap = self._swaps[copy.sequence]
        swap.is_copying = False
        swap.num_copied += len(copy.sources)
        if swap.is_ending:
            self._forget(swap)
            return AfterCopy.HAS_ENDED
        if swap.is_recalled:
            self._pool.free(swap.blocks)
            swap.blocks, swap.num_copied, swap.is_recalled = [], 0, False
            swap.state = SwapState.SWAPPED
            return AfterCopy.IS_OUT
        if copy.is_out:
            if swap.num_copied < len(swap.places):
                return AfterCopy.GOES_ON
            self._pool.free(swap.sequence.vacate())
            swap.state, swap.num_copied = SwapState.SWAPPED, 0
            return AfterCopy.IS_OUT
        if swap.num_copied < len(swap.blocks):
            return AfterCopy.GOES_ON
        blocks, swap.blocks = swap.blocks, []
        self._forget(swap)
        swap.sequence.move_back(blocks)
        return AfterCopy.IS_BACK

    def end(self, sequence: S) -> bool:
        """A sequence is over; False where a copy of it runs, whose end is the sequence's."""
        swap = self._swaps[sequence]
        swap.is_ending = True
        if swap.is_copying:
            return False
        self._forget(swap)
        return True

    def _forget(self, swap: _Swap[S]) -> None:
        del self._swaps[swap.sequence]
        self.give_back([*swap.joined, *swap.places])
        self._pool.free(swap.blocks)
