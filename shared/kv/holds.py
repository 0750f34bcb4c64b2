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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from shared.kv.allocator import STATE_CODES, STATES, BlockAllocator, BlockState
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
    ids: NDArray[np.int64] = field(init=False)
    """The blocks as the books want them."""

    def __post_init__(self) -> None:
        self.ids = np.array(self.blocks, dtype=np.int64)


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
        self._num_holds = {
            state: np.zeros(allocator.num_blocks, dtype=np.uint32) for state in _STRENGTH
        }
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
        hold = Hold(
            blocks=blocks,
            hashes=tuple(hashes),
            cached_tokens=len(shared) * self._block_size,
            num_listed=len(shared),
        )
        self._num_holds[BlockState.ACTIVE][hold.ids] += 1  # no block is in a hold twice
        self._settle(hold.ids)
        self._hit_tokens += hold.cached_tokens
        if hashes:  # else nothing was looked for
            self._missed_tokens += num_tokens - hold.cached_tokens
        return hold

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
        self._num_holds[state][hold.ids] -= 1
        self._num_holds[to][hold.ids] += 1
        hold.state = to
        self._settle(hold.ids)

    def drop(self, hold: Hold) -> None:
        """End a hold; blocks that nobody else holds are kept as cache where listed, else free.

        Its end is evicted before its beginning, which more prompts have in common.

        Raises:
            HoldStateError: It was dropped before.
        """
        state = _require(hold, "dropped")
        self._num_holds[state][hold.ids] -= 1
        hold.state = None
        self._settle(hold.ids)
        is_idle = self._allocator.codes[hold.ids] == STATE_CODES[BlockState.CACHED]
        for block in reversed(hold.ids[is_idle].tolist()):
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
        codes, expected = self._allocator.codes, self._expected_codes()
        for block in np.flatnonzero(codes != expected).tolist():
            raise IntegrityError(
                f"block {block} is {STATES[codes[block]].value}, its holds make it "
                f"{STATES[expected[block]].value}"
            )
        is_idle = np.zeros(len(codes), dtype=bool)
        is_idle[self._cache.idle_blocks()] = True
        for block in np.flatnonzero(is_idle != (codes == STATE_CODES[BlockState.CACHED])).tolist():
            state = self._allocator.state(block)
            raise IntegrityError(f"block {block} is {state.value} and in the wrong line")
        self._is_checked = True

    def _expected_codes(self) -> NDArray[np.uint8]:
        """Return what `_states_of` says of every block, without asking the cache block by block."""
        expected = np.full(self._allocator.num_blocks, STATE_CODES[BlockState.FREE], np.uint8)
        expected[self._cache.blocks()] = STATE_CODES[BlockState.CACHED]
        for state in reversed(_STRENGTH):
            expected[self._num_holds[state] > 0] = STATE_CODES[state]
        expected[RESERVED_BLOCK] = STATE_CODES[BlockState.RESERVED]
        return expected

    def _find(self, num_tokens: int, hashes: Sequence[bytes]) -> list[int]:
        return self._cache.find(hashes[: (num_tokens - 1) // self._block_size])

    def _evict(self, num_blocks: int) -> None:
        evicted = [self._cache.evict() for _ in range(num_blocks)]
        self._allocator.free(evicted)
        self._evicted_blocks += len(evicted)

    def _states_of(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the state that holds and the cache make of each block, as `STATE_CODES`."""
        codes = np.full(len(ids), STATE_CODES[BlockState.FREE], np.uint8)
        for state in reversed(_STRENGTH):
            codes[self._num_holds[state][ids] > 0] = STATE_CODES[state]
        is_held_by_nobody = codes == STATE_CODES[BlockState.FREE]
        if is_held_by_nobody.any():
            is_listed = [block in self._cache for block in ids[is_held_by_nobody].tolist()]
            codes[is_held_by_nobody] = np.where(
                is_listed, STATE_CODES[BlockState.CACHED], STATE_CODES[BlockState.FREE]
            )
        return codes

    def _settle(self, ids: NDArray[np.int64]) -> None:
        """Bring blocks into the state that their holds make."""
        self._is_checked = False
        codes = self._states_of(ids)
        is_to_move = codes != self._allocator.codes[ids]
        for code in np.unique(codes[is_to_move]).tolist():
            moved = ids[is_to_move & (codes == code)]
            self._allocator.move(moved.tolist(), STATES[code])


def _require(hold: Hold, to: str) -> BlockState:
    """Return a hold's state; raise for one that was dropped."""
    if hold.state is None:
        raise HoldStateError(state="dropped", to=to)
    return hold.state
