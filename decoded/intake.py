"""The leases that decoded holds on one link's pool, from first CHUNK to RELEASE.  Pure.

Who owns what.  The source blocks are prefilld's; a lease lets us read them while its generation
stands on the control page.  The target blocks are ours: `Scheduler.reserve` took them for the
lease, and they stay with it until they go to a started sequence (`Pulled`) or back to the
scheduler (`Unreserve`).  Each lease has at most one copy at the engine, and behind it perhaps the
sequence's first step (`early_step.py`); nothing is freed while either runs.

    CHUNK ──room──► RESERVED ──HANDOFF──► ADOPTED ──all blocks copied──► RELEASE, Pulled
      │              │    │                  │
      │              │    │ ABORT, link lost,│ cancelled, or revoked under a copy
      │              │    │ HANDOFF refused  ▼
      │              │    └──────────────► ENDING ──no copy, no step runs──► RELEASE or REJECT
      │              │ revoked under a copy
      │              ▼
      └─no room─► DECLINED ──HANDOFF──► ADOPTED, or REJECT where there still is no room
                     └──ABORT──► RELEASE

`held_lease.py` has what belongs to one lease alone: what it may read, and what is copied next.

With direct access whole blocks stay where they are, and only the one that is partly filled is
copied: `Pulled` says what is read in place, and the lease lasts on in `in_place.py`.  A CHUNK is of
use there only if it brings the first step; NOCHUNK answers any other.

Methods change this table and return effects; the caller carries them out in order.  Every lease
that prefilld told us of is answered by exactly one RELEASE (a REJECT implies it), except over a
lost link, where prefilld has revoked everything by itself.  Messages about unknown leases are
ignored and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from decoded.held_lease import HeldLease, LeaseState
from decoded.lease_effects import (
    UNTIMED,
    BlockCopy,
    CopyTimes,
    Effect,
    Ignored,
    Lost,
    SendAdopt,
    SendNoChunk,
    SendReject,
    SendRelease,
    Unreserve,
)

if TYPE_CHECKING:
    from decoded.early_step import EarlyStep

R = TypeVar("R")


class Intake(Generic[R]):
    """The table of held leases of one link.

    Args:
        reserve: Takes a number of blocks and a place in the batch, or returns None.
        block_size: Tokens in a block.
        is_direct: Whether whole blocks are read in place.
    """

    def __init__(
        self,
        *,
        reserve: Callable[[int], list[int] | None],
        block_size: int = 16,
        is_direct: bool = False,
    ) -> None:
        self._reserve, self._block_size, self._is_direct = reserve, block_size, is_direct
        self._leases: dict[int, HeldLease[R]] = {}
        self._is_link_lost = False
        self.seen = 0
        """First CHUNKs of a lease, and HANDOFFs, read on this link (`Credits.seen`)."""

    @property
    def is_empty(self) -> bool:
        """Whether no lease is left here: what is read in place is in another book."""
        return not self._leases

    @property
    def held(self) -> list[int]:
        """Leases whose blocks we may still read."""
        return [lease.lease_id for lease in self._leases.values() if lease.targets]

    @property
    def num_unstarted(self) -> int:
        """Adopted requests whose sequences have not started."""
        return sum(lease.state is LeaseState.ADOPTED for lease in self._leases.values())

    def num_in_place(self, num_tokens: int) -> int:
        """Return how many blocks of a prompt stay where they are."""
        return num_tokens // self._block_size if self._is_direct else 0

    def chunk(
        self,
        *,
        lease_id: int,
        slot: int,
        generation: int,
        first: int,
        blocks: list[int],
        total: int,
        event: int | None = None,
        early: EarlyStep | None = None,
    ) -> list[Effect[R]]:
        """Take note of blocks that may be read; the first CHUNK of a lease reserves `total`.

        `event` is the slot that must be seen before they are; None where they may be read now.
        `early` comes with the prompt's last blocks, where HANDOFF need not be waited for.
        """
        lease = self._leases.get(lease_id)
        in_place, blocks, total = self._cut(blocks, total, 0 if early is None else early.position)
        if lease is None:
            self.seen += 1
            is_useful = early is not None or not self._is_direct
            targets = self._reserve(total) if is_useful else None
            state = LeaseState.DECLINED if targets is None else LeaseState.RESERVED
            lease = self._hold(lease_id, slot, generation, state, targets or [])
            if state is LeaseState.DECLINED:
                return [SendNoChunk(lease_id)]
        if lease.state is not LeaseState.RESERVED:
            return []  # a CHUNK that crossed our NOCHUNK, or one of a lease that is ending
        is_behind_last = lease.early is not None  # whose step may run by now
        has_room = len(lease.sources) + len(blocks) <= len(lease.targets)
        if is_behind_last or first != len(lease.sources) or not has_room:
            return [Ignored("chunk", lease_id)]
        lease.add_sources(blocks, event)
        if early is not None:
            early.block_table = [*(~block for block in in_place), *lease.targets]
            lease.early, lease.in_place = early, in_place
        return []

    def handoff(
        self,
        *,
        lease_id: int,
        slot: int,
        generation: int,
        blocks: list[int],
        total: int,
        request: R,
        num_tokens: int = 0,
        first_token: int | None = None,
    ) -> list[Effect[R]]:
        """Adopt a request, reserving `total` blocks unless CHUNKs did so before.

        `blocks` is the whole prompt's block table; what CHUNKs named is its beginning.  Of its
        `num_tokens` tokens, those in whole blocks are read in place where access is direct.
        """
        self.seen += 1
        in_place, blocks, total = self._cut(blocks, total, num_tokens)
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is LeaseState.DECLINED:
            targets = self._reserve(total)
            if targets is None:
                text = f"no room for a sequence of {total} blocks"
                return self._reject(lease_id, "no-room", text, request)
            lease = self._hold(lease_id, slot, generation, LeaseState.RESERVED, targets)
        if lease.state is not LeaseState.RESERVED:
            return self._reject(lease_id, "unexpected-message", "the lease is taken", request)
        contradiction = lease.contradiction(
            slot=slot,
            generation=generation,
            blocks=blocks,
            total=total,
            num_tokens=num_tokens,
            first_token=first_token,
        )
        if contradiction is not None:
            return self._reject(lease_id, "invalid-message", contradiction, request)
        lease.adopt(request, blocks=blocks, in_place=in_place, first_token=first_token)
        return [SendAdopt(lease_id, request), *self._when_copied(lease)]

    def refuse(self, lease_id: int, code: str, message: str, request: R) -> list[Effect[R]]:
        """Reject a HANDOFF that cannot be adopted, whatever the room."""
        self.seen += 1
        return self._reject(lease_id, code, message, request)

    def abort(self, lease_id: int) -> list[Effect[R]]:
        """Prefilld takes the lease back; an adopted one is ours to finish, and is released then."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state in (LeaseState.ADOPTED, LeaseState.ENDING):
            return [Ignored("abort", lease_id)]
        return self._end(lease)

    def cancel(self, lease_id: int) -> list[Effect[R]]:
        """End an adopted lease whose client does not want it any more."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ADOPTED:
            return []
        return self._end(lease)

    def link_lost(self) -> list[Effect[R]]:
        """Drop every reservation; what is adopted goes on being pulled from the mapping."""
        self._is_link_lost = True
        effects: list[Effect[R]] = []
        for lease in list(self._leases.values()):
            if lease.state in (LeaseState.RESERVED, LeaseState.DECLINED):
                effects += self._end(lease)
        return effects

    def next_copies(self, max_blocks: int) -> list[BlockCopy]:
        """Choose what to copy in the next turn, `max_blocks` in all; adopted requests first."""
        copies: list[BlockCopy] = []
        order = sorted(self._leases.values(), key=lambda lease: lease.state is LeaseState.RESERVED)
        for lease in order:
            if max_blocks == 0:
                break
            copy = lease.next_copy(max_blocks)
            if copy is not None:
                max_blocks -= len(copy.sources)
                copies.append(copy)
        return copies

    def copied(
        self, copy: BlockCopy, *, is_valid: bool, times: CopyTimes = UNTIMED
    ) -> list[Effect[R]]:
        """Take note that a copy is complete.

        Args:
            copy: What `next_copies` gave.
            is_valid: The lease's generation stood on the control page before and after it.
            times: When it ran.
        """
        lease = self._leases[copy.lease_id]
        lease.copied(copy, times, is_valid=is_valid)
        if lease.state is LeaseState.ENDING:
            return self._end(lease)
        if lease.has_begun_wrong and lease.request is not None:
            text = "prefilld told two first tokens of the answer"
            return [Lost(lease.request, text), *self._end(lease)]
        if is_valid:
            return self._when_copied(lease)
        if lease.state is LeaseState.ADOPTED and lease.request is not None:
            return [Lost(lease.request), *self._end(lease)]
        # Revoked before it was handed off: it stays, without blocks, for its ABORT.
        return self._end(lease) if lease.is_in_use else [Unreserve(lease.decline())]

    def early_done(self, lease_id: int) -> list[Effect[R]]:
        """Take note that a lease's early step was collected before its sequence started."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ENDING:
            return []
        return self._end(lease)

    def _cut(
        self, blocks: list[int], total: int, num_tokens: int
    ) -> tuple[list[int], list[int], int]:
        """Part a prompt's blocks into those that are read in place and those that are copied.

        Returns the two, and how many blocks of our own the sequence needs of `total`.
        """
        num_in_place = self.num_in_place(num_tokens)
        return blocks[:num_in_place], blocks[num_in_place:], total - num_in_place

    def _hold(
        self, lease_id: int, slot: int, generation: int, state: LeaseState, targets: list[int]
    ) -> HeldLease[R]:
        lease: HeldLease[R] = HeldLease(
            lease_id=lease_id, slot=slot, generation=generation, state=state, targets=targets
        )
        self._leases[lease_id] = lease
        return lease

    def _when_copied(self, lease: HeldLease[R]) -> list[Effect[R]]:
        """An adopted lease of which nothing is left to copy ends in a started sequence."""
        if lease.state is not LeaseState.ADOPTED or not lease.is_copied:
            return []
        del self._leases[lease.lease_id]
        # What is read in place is released when its sequence has left.
        released = [] if lease.in_place else self._release(lease)
        return [*released, lease.pulled()]

    def _reject(self, lease_id: int, code: str, message: str, request: R) -> list[Effect[R]]:
        """Do not take a HANDOFF; what was reserved for it goes back, after any copy in flight."""
        rejection = SendReject(lease_id, code, message, request)
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is LeaseState.ADOPTED or lease.rejection is not None:
            return [Ignored("handoff", lease_id), rejection]
        lease.rejection = rejection  # also of a lease that is ending: one answer is enough
        return self._end(lease)

    def _end(self, lease: HeldLease[R]) -> list[Effect[R]]:
        lease.state = LeaseState.ENDING
        if lease.is_in_use:
            return []
        del self._leases[lease.lease_id]
        # Whatever was reserved has at least one block: nothing asks for fewer.
        unreserve: list[Effect[R]] = [Unreserve(lease.targets)] if lease.targets else []
        return [*self._release(lease), *unreserve]

    def _release(self, lease: HeldLease[R]) -> list[Effect[R]]:
        if lease.rejection is not None:
            return [lease.rejection]  # also over a lost link: its descriptor must be closed
        return [] if self._is_link_lost else [SendRelease(lease.lease_id)]
