"""Who holds which blocks of a pool, several of whom may share a block.  Pure.

A *hold* is one request's claim on its blocks, in order: ACTIVE while the request is computed,
LEASED while the peer may read them, QUARANTINED while the peer may be reading though its right is
revoked.  The blocks at its beginning may be other holds' as well: those whose contents the prefix
cache knew.  A block's own state is the strongest of its holds', QUARANTINED > LEASED > ACTIVE; one
that nobody holds is CACHED where the cache lists it, and FREE otherwise.

Nobody writes a shared block.  A hold shares at most `(num_tokens - 1) // block_size` blocks, so at
least its last token is computed, into a block of its own; and a block is listed once its tokens are
computed, after which nothing writes it before it was evicted, which takes that nobody holds it.
Whoever revokes a lease before its hold is dropped has so revoked every lease on a block before
anybody writes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from shared.kv.allocator import STATE_CODES, BlockAllocator, BlockState
from shared.kv.errors import HoldStateError, IntegrityError
from shared.kv.layout import RESERVED_BLOCK
from shared.kv.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STRENGTH = (BlockState.QUARANTINED, BlockState.LEASED, BlockState.ACTIVE)
"""What a hold can be, the strongest first."""

HOLD_MOVES: Mapping[BlockState, frozenset[BlockState]] = MappingProxyType(
    {
        BlockState.ACTIVE: frozenset({BlockState.LEASED}),
        # Back to ACTIVE when a hand-off failed and the request is this daemon's again.
        BlockState.LEASED: frozenset({BlockState.ACTIVE, BlockState.QUARANTINED}),
        BlockState.QUARANTINED: frozenset(),
    }
)
"""Where a hold may go from each state by `move`; from each it may be dropped."""


@dataclass(eq=False, slots=True, kw_only=True)
class Hold:
    """One request's claim on its blocks.  Compared by identity; `BlockHolds` alone changes it."""

    blocks: tuple[int, ...]
    """In the order of the tokens."""
    hashes: tuple[bytes, ...]
    """Of the whole blocks, as far as they are known."""
    cached_tokens: int
    """Tokens at the beginning whose keys and values were there already."""
    num_listed: int
    """Blocks at the beginning that the prefix cache was told of."""
    state: BlockState | None = BlockState.ACTIVE
    """ACTIVE, LEASED or QUARANTINED; None once it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What the prefix cache was good for, since the start and now."""

    hit_tokens: int
    """Of all holds: tokens whose keys and values were found."""
    missed_tokens: int
    """Of all holds that might have shared any: tokens that were left to compute."""
    evicted_blocks: int
    """Blocks that were given up for others."""
    blocks: int
    """Blocks that are listed now, whether somebody holds them or not."""


class BlockHolds:
    """Every hold on the blocks of one pool, and the prefix cache.

    Args:
        allocator: The pool's; nobody else changes it.
        block_size: Tokens a block.
    """

    def __init__(self, allocator: BlockAllocator, *, block_size: int) -> None:
        self._allocator, self._block_size = allocator, block_size
        self._cache = PrefixCache()
        nobody = bytes(array("I").itemsize * allocator.num_blocks)
        self._num_holds = tuple((state, array("I", nobody)) for state in _STRENGTH)
        """How many holds each block is in, by their state, the strongest first."""
        self._is_checked = False
        """Nothing has changed since the books were checked."""
        self._hit_tokens = self._missed_tokens = self._evicted_blocks = 0

    @property
    def cache_use(self) -> CacheUse:
        """What the prefix cache was good for."""
        return CacheUse(
            hit_tokens=self._hit_tokens,
            missed_tokens=self._missed_tokens,
            evicted_blocks=self._evicted_blocks,
            blocks=len(self._cache),
        )

    def cached_tokens(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """Return how many tokens of a sequence `take` would find now; nothing is changed.

        Args:
            num_tokens: Of the sequence.
            hashes: Of its whole blocks, or of as many as may be shared.
        """
        return len(self._find(num_tokens, hashes)) * self._block_size

    def take(self, num_tokens: int, hashes: Sequence[bytes] = ()) -> Hold | None:
        """Get blocks for a sequence: known ones for its beginning, fresh ones for the rest.

        Idle blocks of the prefix cache are evicted where too few are free, the least recently used
        first, but none that this sequence shares.

        Args:
            num_tokens: Of the sequence, at least 1.
            hashes: Of its whole blocks, in order; none where it is not to share any.

        Returns:
            An ACTIVE hold; None where there are too few blocks, and then nothing has changed.

        Raises:
            ValueError: `num_tokens` is not positive.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; a hold has at least one block")
        shared = self._find(num_tokens, hashes)
        num_fresh = -(-num_tokens // self._block_size) - len(shared)
        num_kept = sum(self._cache.is_idle(block) for block in shared)
        if num_fresh > self._allocator.num_free + self._cache.num_idle - num_kept:
            return None
        for block in shared:
            self._cache.use(block)
        self._evict(num_fresh - self._allocator.num_free)
        blocks = (*shared, *self._allocator.allocate(num_fresh))
        self._count(blocks, BlockState.ACTIVE, +1)
        self._settle(blocks)
        cached_tokens = len(shared) * self._block_size
        self._hit_tokens += cached_tokens
        if hashes:  # else nothing was looked for
            self._missed_tokens += num_tokens - cached_tokens
        return Hold(
            blocks=blocks,
            hashes=tuple(hashes),
            cached_tokens=cached_tokens,
            num_listed=len(shared),
        )

    def computed(self, hold: Hold, num_tokens: int) -> None:
        """List the blocks that are complete once `num_tokens` of a hold's tokens are computed.

        Computed, not only begun: whoever shares them reads them at once.

        Raises:
            HoldStateError: The hold was dropped.
        """
        _require(hold, "computed")
        num_complete = min(num_tokens // self._block_size, len(hold.hashes))
        for index in range(hold.num_listed, num_complete):
            self._cache.add(hold.hashes[index], hold.blocks[index])
        hold.num_listed = max(hold.num_listed, num_complete)

    def move(self, hold: Hold, to: BlockState) -> None:
        """Change what a hold is.

        Raises:
            HoldStateError: It was dropped, or may not go there (see `HOLD_MOVES`).
        """
        state = _require(hold, to.value)
        if to not in HOLD_MOVES[state]:
            raise HoldStateError(state=state.value, to=to.value)
        self._count(hold.blocks, state, -1)
        self._count(hold.blocks, to, +1)
        hold.state = to
        self._settle(hold.blocks)

    def drop(self, hold: Hold) -> None:
        """End a hold; blocks that nobody else holds are kept as cache where listed, else free.

        Its end is evicted before its beginning, which more prompts have in common.

        Raises:
            HoldStateError: It was dropped before.
        """
        state = _require(hold, "dropped")
        self._count(hold.blocks, state, -1)
        hold.state = None
        self._settle(hold.blocks)
        for block in reversed(hold.blocks):
            if self._allocator.state(block) is BlockState.CACHED:
                self._cache.retire(block)

    def check_integrity(self) -> None:
        """Count everything anew and compare; to be called whenever the daemon is idle.

        Where nothing changed since the last time, nothing is counted.

        Raises:
            IntegrityError: The books contradict each other.
        """
        if self._is_checked:
            return
        self._allocator.check_integrity()
        self._cache.check_integrity()
        codes = self._allocator.codes
        for block in np.flatnonzero(codes != self._expected_codes()).tolist():
            state, expected = self._allocator.state(block), self._state_of(block)
            raise IntegrityError(
                f"block {block} is {state.value}, its holds make it {expected.value}"
            )
        is_idle = np.zeros(len(codes), dtype=bool)
        is_idle[self._cache.idle_blocks()] = True
        for block in np.flatnonzero(is_idle != (codes == STATE_CODES[BlockState.CACHED])).tolist():
            state = self._allocator.state(block)
            raise IntegrityError(f"block {block} is {state.value} and in the wrong line")
        self._is_checked = True

    def _expected_codes(self) -> NDArray[np.uint8]:
        """Return what `_state_of` says of every block, as `STATE_CODES`."""
        expected = np.full(self._allocator.num_blocks, STATE_CODES[BlockState.FREE], np.uint8)
        expected[self._cache.blocks()] = STATE_CODES[BlockState.CACHED]
        for state, num_holds in reversed(self._num_holds):
            expected[np.frombuffer(num_holds, dtype=np.uintc) > 0] = STATE_CODES[state]
        expected[RESERVED_BLOCK] = STATE_CODES[BlockState.RESERVED]
        return expected

    def _find(self, num_tokens: int, hashes: Sequence[bytes]) -> list[int]:
        return self._cache.find(hashes[: (num_tokens - 1) // self._block_size])

    def _evict(self, num_blocks: int) -> None:
        evicted = [self._cache.evict() for _ in range(num_blocks)]
        self._allocator.free(evicted)
        self._evicted_blocks += len(evicted)

    def _count(self, blocks: Iterable[int], state: BlockState, step: int) -> None:
        counts = self._num_holds[_STRENGTH.index(state)][1]
        for block in blocks:
            counts[block] += step

    def _state_of(self, block: int) -> BlockState:
        for state, num_holds in self._num_holds:
            if num_holds[block]:
                return state
        return BlockState.CACHED if block in self._cache else BlockState.FREE

    def _settle(self, blocks: Sequence[int]) -> None:
        """Bring blocks into the state that their holds make."""
        self._is_checked = False
        moves: dict[BlockState, list[int]] = {}
        for block in blocks:
            state = self._state_of(block)
            if state is not self._allocator.state(block):
                moves.setdefault(state, []).append(block)
        for state, moved in moves.items():
            self._allocator.move(moved, state)


def _require(hold: Hold, to: str) -> BlockState:
    """Return a hold's state; raise for one that was dropped."""
    if hold.state is None:
        raise HoldStateError(state="dropped", to=to)
    return hold.state
