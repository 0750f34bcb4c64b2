"""Which blocks hold which prefixes, and which of those may be evicted first.  Pure.

A block is listed under the hash of its prefix (`shared/kv/block_hashes.py`) from the moment its
tokens are computed.  While somebody holds it, it is *in use*; once nobody does, it waits in line,
the least recently used first, until it is used again or evicted.  What is in use is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shared.kv.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PrefixCache:
    """The list of prefixes, and the line of those that nobody uses."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        """By the hash of what they hold."""
        self._hashes: dict[int, bytes] = {}
        """The same the other way round."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Listed blocks that nobody uses; the next to be evicted is first."""

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self._blocks)} blocks, {len(self._idle)} of them idle>"

    def __len__(self) -> int:
        """Return how many blocks are listed."""
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        """Whether a block is listed."""
        return block in self._hashes

    @property
    def num_idle(self) -> int:
        """Blocks that could be evicted now."""
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        """Whether a block is listed and nobody uses it."""
        return block in self._idle

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of a sequence.

        Args:
            hashes: Of the sequence's blocks, in order.
        """
        found = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block_hash: bytes, block: int) -> None:
        """List a block that is in use and computed.

        Where another block has the same contents, that one stays, as recently used as this one.
        """
        known = self._blocks.get(block_hash)
        if known is None:
            self._blocks[block_hash] = block
            self._hashes[block] = block_hash
        elif known in self._idle:
            self._idle.move_to_end(known)

    def use(self, block: int) -> None:
        """Take a listed block out of the line: somebody holds it."""
        self._idle.pop(block, None)

    def retire(self, block: int) -> None:
        """Put a listed block that nobody holds any more at the end of the line."""
        self._idle[block] = None

    def evict(self) -> int:
        """Strike the block off the list that nobody has used for longest, and return it.

        Raises:
            KeyError: Every listed block is in use.
        """
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._hashes.pop(block)]
        return block

    def blocks(self) -> NDArray[np.int64]:
        """Return the listed blocks, in no order."""
        return np.fromiter(self._hashes, dtype=np.int64, count=len(self._hashes))

    def idle_blocks(self) -> NDArray[np.int64]:
        """Return those of them that nobody holds, the first to be evicted first."""
        return np.fromiter(self._idle, dtype=np.int64, count=len(self._idle))

    def check_integrity(self) -> None:
        """Check that each block has one hash, each hash one block, and only listed ones wait.

        Raises:
            IntegrityError: The books contradict each other.
        """
        if {block: block_hash for block_hash, block in self._blocks.items()} != self._hashes:
            raise IntegrityError("the prefix cache lists a block twice, or not both ways")
        if strangers := self._idle.keys() - self._hashes.keys():
            raise IntegrityError(
                f"blocks {sorted(strangers)[:8]} wait unlisted in the prefix cache"
            )
