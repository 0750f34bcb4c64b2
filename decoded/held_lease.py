"""One lease as decoded holds it: its blocks, how far they are copied, and what is next.  Pure.

`intake.py` has the diagram of the states, and takes a lease from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from decoded.lease_effects import BlockCopy, CopyTimes, Pulled, SendReject
from shared.engine.device_timing import add_device_ns

if TYPE_CHECKING:
    from decoded.early_step import EarlyStep

R = TypeVar("R")


class LeaseState(Enum):
    """Where a held lease stands; see the diagram in `intake.py`."""

    RESERVED = auto()
    """It has blocks of ours, and its HANDOFF is to come."""
    DECLINED = auto()
    """There was no room, or it was revoked: it has no blocks; its HANDOFF or ABORT is to come."""
    ADOPTED = auto()
    """Its request is ours, and its blocks are being copied."""
    ENDING = auto()
    """To be released and unreserved as soon as no copy and no early step runs."""


@dataclass(slots=True, kw_only=True)
class HeldLease(Generic[R]):
    """One lease as decoded sees it."""

    lease_id: int
    slot: int
    """On prefilld's control page."""
    generation: int
    """As long as the slot holds it, the sources may be read."""
    state: LeaseState
    sources: list[int] = field(default_factory=list)
    """Blocks of prefilld's pool that may be read now, in the order of the prompt."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of sources, event slot): up to there they are written once the event is seen."""
    targets: list[int] = field(default_factory=list)
    """Our blocks for prompt and answer; none where it was declined."""
    num_copied: int = 0
    """Sources that are in their targets."""
    is_copying: bool = False
    """A copy of it is at the engine; there is one at most."""
    copy_start_ns: int = 0
    """When its first copy began, on CLOCK_MONOTONIC; 0 before."""
    copy_done_ns: int = 0
    """When its latest copy ended."""
    device_ns: int | None = None
    """How long its copies took the GPU, in sum; None where no GPU copied."""
    last_device_ns: int | None = None
    """How long its latest one did."""
    early: EarlyStep | None = None
    """How to begin before HANDOFF comes, where prefilld told."""
    in_place: list[int] = field(default_factory=list)
    """Blocks at the beginning of the prompt that are not copied."""
    request: R | None = None
    """From ADOPT on."""
    first_token: int | None = None
    """Of the request's answer, as HANDOFF told it."""
    rejection: SendReject[R] | None = None
    """What ends the lease in place of RELEASE, where its HANDOFF cannot be adopted."""

    @property
    def is_in_use(self) -> bool:
        """Whether the engine reads or writes the target blocks."""
        return self.is_copying or (self.early is not None and self.early.is_in_flight)

    @property
    def is_copied(self) -> bool:
        """Whether every source that may be read was copied."""
        return self.num_copied == len(self.sources) and not self.is_copying

    def add_sources(self, blocks: list[int], event: int | None) -> None:
        """Take note of blocks that may be read, once that event was seen where there is one."""
        self.sources.extend(blocks)
        if event is not None:
            self.events.append((len(self.sources), event))

    def contradiction(
        self,
        *,
        slot: int,
        generation: int,
        blocks: list[int],
        total: int,
        num_tokens: int,
        first_token: int | None,
    ) -> str | None:
        """Return what a HANDOFF denies of all that CHUNKs said before, or None.

        Args:
            slot: The lease's.
            generation: The lease's.
            blocks: The whole prompt's that are to be copied.
            total: Blocks of ours that the sequence needs.
            num_tokens: Of the prompt.
            first_token: Of the answer.
        """
        named = (slot, generation, total, blocks[: len(self.sources)])
        if named != (self.slot, self.generation, len(self.targets), self.sources):
            return "HANDOFF contradicts what CHUNKs named"
        if self.early is not None and self.early.contradicts(num_tokens, first_token):
            return "HANDOFF contradicts the first token told"
        return None

    @property
    def has_begun_wrong(self) -> bool:
        """Whether the early step began with another token than a HANDOFF that came meanwhile."""
        if self.request is None or self.early is None:
            return False
        return self.early.has_begun_otherwise(self.first_token)

    def adopt(
        self, request: R, *, blocks: list[int], in_place: list[int], first_token: int | None = None
    ) -> None:
        """The request is ours; all of its prompt is written, and may be read."""
        self.state, self.request, self.first_token = LeaseState.ADOPTED, request, first_token
        self.sources, self.in_place = list(blocks), in_place
        # The first token was read back behind all of them: no event need be looked at.
        self.events.clear()

    def next_copy(self, max_blocks: int) -> BlockCopy | None:
        """Begin the next copy of this lease, of at most `max_blocks`; None where none is due.

        One chunk at a time: what is written need not wait for what is not.  The last copy brings
        the early step along, where there is one; with direct access there may be nothing to copy
        but that, and then the copy is empty.
        """
        if self.is_copying or self.state is LeaseState.ENDING:
            return None
        start = self.num_copied
        end, event = next(
            (mark for mark in self.events if mark[0] > start), (len(self.sources), None)
        )
        sources = self.sources[start : min(end, start + max_blocks)]
        early = None
        if start + len(sources) == len(self.sources) and self._is_early_due:
            early = self.early
        if early is not None:
            early.was_offered = True
            # Also of an empty copy: the step reads in place what that event stands for.
            event = self.events[-1][1] if self.events else None
        elif not sources:
            return None
        self.is_copying = True
        return BlockCopy(
            lease_id=self.lease_id,
            slot=self.slot,
            generation=self.generation,
            sources=sources,
            targets=self.targets[start : start + len(sources)],
            event=event,
            early=early,
        )

    @property
    def _is_early_due(self) -> bool:
        """Whether the engine may begin the first step; a HANDOFF that is here needs no help."""
        return self.request is None and self.early is not None and not self.early.was_offered

    def copied(self, copy: BlockCopy, times: CopyTimes, *, is_valid: bool) -> None:
        """Take note that a copy is over; one that is not valid has brought nothing."""
        self.is_copying = False
        self.copy_start_ns = self.copy_start_ns or times.start_ns
        self.copy_done_ns = times.done_ns
        if copy.sources:  # an empty one only brings the early step along
            self.device_ns = add_device_ns(self.device_ns, times.device_ns)
            self.last_device_ns = times.device_ns
        if is_valid:
            self.num_copied += len(copy.sources)

    def pulled(self) -> Pulled[R]:
        """Return what the lease comes to: it is adopted, and all is copied."""
        assert self.request is not None, "a lease is adopted before it is pulled"
        has_begun = self.early is not None and self.early.is_launched
        return Pulled(
            self.request,
            self.targets,
            self.copy_start_ns,
            self.copy_done_ns,
            in_place=self.in_place,
            early=self.early if has_begun else None,
            device_ns=self.device_ns,
            last_device_ns=self.last_device_ns,
        )

    def decline(self) -> list[int]:
        """Have no blocks any more, and wait for HANDOFF or ABORT; return the targets."""
        blocks, self.targets, self.sources = self.targets, [], []
        self.events.clear()
        self.num_copied = 0
        self.state = LeaseState.DECLINED
        return blocks
