"""One lease as decoded holds it: its state, its blocks, how far its copy has come.  Pure data.

`intake.py` says what the states mean and changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from decoded.lease_effects import SendReject

if TYPE_CHECKING:
    from decoded.early_step import EarlyStep

R = TypeVar("R")


class LeaseState(Enum):
    """Where a held lease stands; see the module's diagram."""

    RESERVED = auto()
    DECLINED = auto()
    ADOPTED = auto()
    ENDING = auto()
    """To be released and unreserved as soon as no copy and no early step runs."""


@dataclass(slots=True, kw_only=True)
class HeldLease(Generic[R]):
    """One lease as decoded sees it."""

    lease_id: int
    slot: int
    generation: int
    state: LeaseState
    sources: list[int] = field(default_factory=list)
    """Blocks of prefilld's pool that may be read now, in the order of the prompt."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of sources, event slot): up to there they are written once the event is seen."""
    targets: list[int] = field(default_factory=list)
    """Our blocks for prompt and answer."""
    num_copied: int = 0
    is_copying: bool = False
    copy_start_ns: int = 0
    copy_done_ns: int = 0
    early: EarlyStep | None = None
    """How to begin before HANDOFF comes, where prefilld told."""
    in_place: list[int] = field(default_factory=list)
    """Blocks at the beginning of the prompt that are not copied."""
    request: R | None = None
    rejection: SendReject[R] | None = None
    """What ends the lease in place of RELEASE, where its HANDOFF cannot be adopted."""

    @property
    def is_in_use(self) -> bool:
        """Whether the engine reads or writes the target blocks."""
        return self.is_copying or (self.early is not None and self.early.is_in_flight)
