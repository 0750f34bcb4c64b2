"""Which block of a pool is in whose hands: a pure allocator that refuses what makes no sense.

Every block is in exactly one state, and `LEGAL_MOVES` says which may follow it.  Whatever is wrong
with a call, a block twice in it, a double free, an illegal move, is an error that names the
block and its state, and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from shared.kv.errors import (
    BlockMoveError,
    IntegrityError,
    OutOfBlocksError,
    RepeatedBlockError,
    UnknownBlockError,
)
from shared.kv.layout import RESERVED_BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BlockState(enum.Enum):
    """In whose hands a block is."""

    RESERVED = "reserved"
    """Block 0: the proof at hand-shake is written there."""
    FREE = "free"
    """Nobody's."""
    CACHED = "cached"
    """Holds a prefix that a later prompt may share; may be evicted."""
    ACTIVE = "active"
    """Running requests': this daemon alone reads it, and writes it while one of them has it."""
    LEASED = "leased"
    """The peer may read it."""
    QUARANTINED = "quarantined"
    """The peer's right was revoked, but the peer is not known to have stopped reading."""


STATES = tuple(BlockState)
STATE_CODES: Mapping[BlockState, int] = MappingProxyType(
    {state: code for code, state in enumerate(STATES)}
)
"""How a state is written down where one byte a block has to do."""

LEGAL_MOVES: Mapping[BlockState, frozenset[BlockState]] = MappingProxyType(
    {
        BlockState.RESERVED: frozenset(),
        # `allocate` alone takes blocks out of FREE: the caller must not choose which.
        BlockState.FREE: frozenset(),
        BlockState.ACTIVE: frozenset({BlockState.LEASED, BlockState.CACHED, BlockState.FREE}),
        BlockState.CACHED: frozenset({BlockState.ACTIVE, BlockState.FREE}),
        # Back to ACTIVE when a hand-off failed and the request is this daemon's again.
        BlockState.LEASED: frozenset(
            {BlockState.ACTIVE, BlockState.QUARANTINED, BlockState.CACHED, BlockState.FREE}
        ),
        # Back to another hold's ACTIVE or LEASED where that shares the block.
        BlockState.QUARANTINED: frozenset(
            {BlockState.ACTIVE, BlockState.LEASED, BlockState.CACHED, BlockState.FREE}
        ),
    }
)
"""Where a block may go from each state by `move` and `free`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """How many blocks are in each state; the six add up to `total`."""

    total: int
    reserved: int
    free: int
    cached: int
    active: int
    leased: int
    quarantined: int


class BlockAllocator:
    """Hands out the blocks of one pool and knows where each of them is.

    Freed blocks are handed out again first, in the order in which they were freed together.
    Their pages are the ones touched already and the warmest in the caches, so a pool that is larger
    than its load, and keeps no cache, never becomes resident beyond it.  Holding them back for
    longer would buy no safety: a late reader is fenced off by its lease's generation, not by luck.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with block 0 reserved and all others free.

        Raises:
            ValueError: There is no block beside the reserved one.
        """
        if num_blocks < RESERVED_BLOCK + 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least 2")
        # Bytes, so that a check of 10^5 blocks takes no longer than a request may wait for it.
        self._codes = bytearray([STATE_CODES[BlockState.FREE]]) * num_blocks
        self._codes[RESERVED_BLOCK] = STATE_CODES[BlockState.RESERVED]
        # A stack: its end is handed out next, so the lowest ids come first.
        self._free = list(range(num_blocks - 1, RESERVED_BLOCK, -1))
        self._num = dict.fromkeys(BlockState, 0)
        self._num[BlockState.RESERVED] = 1
        self._num[BlockState.FREE] = len(self._free)
        self._is_checked = False
        """Nothing has changed since the books were checked."""

    def __repr__(self) -> str:
        numbers = ", ".join(f"{number} {state.value}" for state, number in self._num.items())
        return f"<BlockAllocator {len(self._codes)} blocks: {numbers}>"

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the reserved one included."""
        return len(self._codes)

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The state of each block, [num_blocks] of `STATE_CODES`; a view, not to be written."""
        view = np.frombuffer(self._codes, dtype=np.uint8)
        view.flags.writeable = False
        return view

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    def state(self, block: int) -> BlockState:
        """Return the state of a block.

        Raises:
            UnknownBlockError: The pool has no such block.
        """
        if not 0 <= block < len(self._codes):
            raise UnknownBlockError(block=block, num_blocks=len(self._codes))
        return STATES[self._codes[block]]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks; they are ACTIVE then.

        Raises:
            OutOfBlocksError: Fewer are free; none was taken.
            ValueError: `num_blocks` is negative.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}; it must not be negative")
        if num_blocks > len(self._free):
            raise OutOfBlocksError(
                requested=num_blocks, free=len(self._free), total=len(self._codes)
            )
        cut = len(self._free) - num_blocks
        blocks = self._free[cut:]
        del self._free[cut:]
        blocks.reverse()
        self._num[BlockState.FREE] -= num_blocks
        self._set(blocks, BlockState.ACTIVE)
        return blocks

    def move(self, blocks: Iterable[int], to: BlockState) -> None:
        """Move blocks, whatever state each is in, into another one.

        Raises:
            UnknownBlockError: The pool has no such block.
            RepeatedBlockError: A block is named twice.
            BlockMoveError: A block may not go from its state to `to` (see `LEGAL_MOVES`).
        """
        blocks = list(blocks)
        codes = self._codes_for_move(blocks, to)
        for code in frozenset(codes):
            self._num[STATES[code]] -= codes.count(code)
        if to is BlockState.FREE:
            self._free.extend(reversed(blocks))
        self._set(blocks, to)

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; the same as a move to FREE.

        Raises:
            UnknownBlockError: The pool has no such block.
            RepeatedBlockError: A block is named twice.
            BlockMoveError: A block is free already, or reserved.
        """
        self.move(blocks, BlockState.FREE)

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each state, in constant time."""
        return BlockCounts(
            total=len(self._codes),
            **{state.value: number for state, number in self._num.items()},
        )

    def check_integrity(self) -> None:
        """Count everything anew and compare; to be called whenever the daemon is idle.

        Where nothing changed since the last time, nothing is counted.

        Raises:
            IntegrityError: The books contradict each other.
        """
        if self._is_checked:
            return
        found = {state: self._codes.count(code) for state, code in STATE_CODES.items()}
        if found != self._num:
            raise IntegrityError(f"blocks by state are {found}, the books say {self._num}")
        free = np.flatnonzero(self.codes == STATE_CODES[BlockState.FREE])
        if not np.array_equal(free, np.sort(np.array(self._free, dtype=np.int64))):
            raise IntegrityError(
                f"{len(free)} blocks are free, the free list has {len(self._free)} and "
                f"differs by {sorted({*free.tolist()} ^ {*self._free})[:8]}"
            )
        if self.state(RESERVED_BLOCK) is not BlockState.RESERVED:
            raise IntegrityError(f"block {RESERVED_BLOCK} is {self.state(RESERVED_BLOCK).value}")
        self._is_checked = True

    def _codes_for_move(self, blocks: list[int], to: BlockState) -> bytes:
        """Return the codes of blocks that may all go to `to`; raise what is wrong if they may not.

        A prompt has a thousand blocks and the event loop waits for this, so they are looked at
        together, and one by one only to say which of them is at fault.
        """
        if not blocks:
            return b""
        if min(blocks) >= 0 and max(blocks) < len(self._codes):
            codes = bytes(map(self._codes.__getitem__, blocks))
            is_legal = all(to in LEGAL_MOVES[STATES[code]] for code in frozenset(codes))
            if is_legal and len(frozenset(blocks)) == len(blocks):
                return codes
        seen: set[int] = set()
        for block in blocks:
            state = self.state(block)
            if block in seen:
                raise RepeatedBlockError(block=block, state=state.value)
            seen.add(block)
            if to not in LEGAL_MOVES[state]:
                raise BlockMoveError(block=block, state=state.value, to=to.value)
        raise AssertionError("each of them may go there, and all together may not")

    def _set(self, blocks: list[int], to: BlockState) -> None:
        """Write down that blocks, which are counted nowhere now, are in a state."""
        self._is_checked = False
        codes, code = self._codes, STATE_CODES[to]
        for block in blocks:
            codes[block] = code
        self._num[to] += len(blocks)
