"""What the batch and the book of swaps must know of a sequence; `sequence.py` has it."""

from __future__ import annotations

from typing import Protocol


class Swappable(Protocol):
    """A sequence as `swap_book.py` sees it."""

    num_in_flight: int
    """Steps that are launched and not collected, which write its blocks; `Scheduler` counts."""

    @property
    def adopted_ns(self) -> int:
        """When it was adopted: who is older goes first."""

    @property
    def blocks(self) -> list[int]:
        """Its blocks of our own pool, in order."""

    def vacate(self) -> list[int]:
        """Have no blocks of our own pool any more; return those that it had."""

    def move_back(self, blocks: list[int]) -> None:
        """Have these blocks of our own pool from now on."""


class Schedulable(Swappable, Protocol):
    """A sequence as `scheduler.py` sees it."""

    @property
    def wants_step(self) -> bool:
        """Whether it has tokens left to launch a step for."""

    @property
    def lacks_slot(self) -> bool:
        """Whether the token of its next step has no place in its blocks."""

    @property
    def is_moving(self) -> bool:
        """Whether blocks of our own pool are being filled for it: then it is not preempted."""

    def extend(self, block: int) -> None:
        """Have one more block of our own pool behind all others."""
