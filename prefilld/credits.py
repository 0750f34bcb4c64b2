"""How much room decoded still has, counting what is on its way there.  Pure.

decoded tells its room absolutely, in every frame, together with how many reserving frames
(first CHUNKs and HANDOFFs) it had read when it counted.  What prefilld sent since is not in that
count yet, so it is subtracted here until a later frame says that it was seen.  Neither side can
so promise the same room twice, whatever crosses whatever on the wire.  Answers that grow may take
it before we do; then decoded rejects, and tells what is left.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

REJECT_PAUSE_NS = 50_000_000
"""How long no HANDOFF follows a REJECT: decoded had told of room, so it is gone since (answers
grow), or something is wrong there (no descriptor left, say): asking at once would only keep both
busy."""


@dataclass(frozen=True, slots=True)
class _Spent:
    blocks: int
    sequences: int


class CreditAccount:
    """The credits of one link; a new link starts a new account.

    Args:
        most_blocks: What decoded's pool can ever have for one sequence; None where it is not known.
    """

    def __init__(self, most_blocks: int | None = None) -> None:
        self._most_blocks = most_blocks
        self._free_blocks = 0
        self._free_sequences = 0
        self._num_sent = 0
        self._unseen: deque[_Spent] = deque()
        self._doubted_until_ns = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that a further reservation may ask for."""
        return self._free_blocks - sum(spent.blocks for spent in self._unseen)

    @property
    def free_sequences(self) -> int:
        """Sequences that may still be reserved."""
        return self._free_sequences - sum(spent.sequences for spent in self._unseen)

    def rejected(self, now_ns: int) -> None:
        """Take note that decoded did not take what it had told of room for."""
        self._doubted_until_ns = now_ns + REJECT_PAUSE_NS

    def are_doubted(self, now_ns: int) -> bool:
        """Whether decoded's word is not acted upon, for a REJECT contradicted it just now."""
        return now_ns < self._doubted_until_ns

    def covers(self, total_blocks: int) -> bool:
        """Whether decoded has room for one more sequence of `total_blocks` blocks.

        What can never fit is not waited for, and neither are those behind it: a decoded that was
        started with a smaller pool rejects it for good.
        """
        is_hopeless = self._most_blocks is not None and total_blocks > self._most_blocks
        return self.free_sequences >= 1 and (is_hopeless or self.free_blocks >= total_blocks)

    def spend(self, total_blocks: int) -> None:
        """Take note of a frame that reserves a place and `total_blocks` blocks."""
        self._num_sent += 1
        self._unseen.append(_Spent(total_blocks, 1))

    def spend_reserved(self) -> None:
        """Take note of a HANDOFF whose place and blocks were reserved by an earlier CHUNK."""
        self._num_sent += 1
        self._unseen.append(_Spent(0, 0))

    def update(self, *, free_blocks: int, free_sequences: int, seen: int) -> None:
        """Take decoded's word, given after it had read `seen` of our reserving frames.

        Raises:
            ValueError: decoded claims to have seen more than was sent.
        """
        if seen > self._num_sent:
            raise ValueError(
                f"decoded saw {seen} reservations, but only {self._num_sent} were sent"
            )
        self._free_blocks, self._free_sequences = free_blocks, free_sequences
        while len(self._unseen) > self._num_sent - seen:
            self._unseen.popleft()
