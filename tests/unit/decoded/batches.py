"""A sequence as the scheduler sees it, for tests without streams and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

NUMBERS = count(1)


@dataclass(eq=False)
class FakeSequence:
    """Blocks, and how many of their slots are taken by computed tokens."""

    blocks: list[int]
    num_tokens: int = 0
    """Computed in its blocks."""
    max_tokens: int = 1 << 20
    block_size: int = 4
    num_in_flight: int = 0
    is_moving: bool = False
    adopted_ns: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def wants_step(self) -> bool:
        return self.num_tokens + self.num_in_flight < self.max_tokens

    @property
    def lacks_slot(self) -> bool:
        return self.num_tokens + self.num_in_flight >= len(self.blocks) * self.block_size

    def extend(self, block: int) -> None:
        self.blocks = [*self.blocks, block]

    def vacate(self) -> list[int]:
        blocks, self.blocks = self.blocks, []
        return blocks

    def move_back(self, blocks: list[int]) -> None:
        self.blocks = blocks
