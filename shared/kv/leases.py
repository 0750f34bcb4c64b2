"""Who may read which blocks: prefilld's table of leases, without a clock, a socket or a page.

A request's blocks on prefilld's side, and what frees them:

    [admitted ....... open)     the request's            the request's end
    [open .......... adopt)     the request's, but lent  nothing: `abort` first, or wait
    [adopt, abort .. release)   the lease's              `FreeBlocks`
    [link lost ..... proof)     quarantined              `FreeBlocks`

    `ReturnRequest` ends the second interval and leads back to the first.

What a slot of the control page holds, and who may read under it:

    [start .... open) even   nobody
    [open ...... end) odd    this lease's holder; the generation is the lease's own
    [end ...... open) even   nobody: whoever still reads under the lease reads in vain

Every call changes the table only and returns effects, which the caller carries out in the order
given.  A lease's revocation comes before whatever lets its blocks be written again.  An event that
does not fit (late, doubled, unknown, out of order) changes nothing and returns `Ignored`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from shared.kv.errors import IntegrityError, LeaseStateError, NoSlotError
from shared.kv.lease_states import (
    OUR_EVENTS,
    TRANSITIONS,
    CloseClient,
    Effect,
    FreeBlocks,
    Ignored,
    LeaseEvent,
    LeaseState,
    Outcome,
    PublishGeneration,
    Quarantine,
    ReturnReason,
    ReturnRequest,
    SendAbort,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The peer's right to read a request's blocks, as it stood when it was looked up."""

    lease_id: int
    """Counts up from 1 within the epoch."""
    request_id: str
    blocks: tuple[int, ...]
    slot: int
    generation: int
    """What the control page holds at `slot` until the lease is revoked; odd."""
    state: LeaseState = LeaseState.OPEN
    deadline_s: float | None = None
    """When quarantine ends at the latest; None outside quarantine."""


class LeaseTable:
    """Every lease of one epoch that has not ended."""

    def __init__(self, num_slots: int) -> None:
        """Start empty, over a control page of `num_slots` slots that all hold 0.

        Raises:
            ValueError: `num_slots` is not positive.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; a lease needs a slot")
        self._leases: dict[int, Lease] = {}
        self._next_id = 1
        self._generations = [0] * num_slots
        # A stack whose end is taken next, so the lowest slots come first.
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the leases that have not ended, oldest first."""
        return iter(tuple(self._leases.values()))

    def __repr__(self) -> str:
        leases = ", ".join(f"{lease.lease_id} {lease.state.value}" for lease in self)
        return f"<LeaseTable {len(self._free_slots)} slots free; {leases or 'no leases'}>"

    def get(self, lease_id: int) -> Lease | None:
        """Return a lease that has not ended, or None."""
        return self._leases.get(lease_id)

    def open(self, request_id: str, blocks: Sequence[int]) -> tuple[Lease, list[Effect]]:
        """Lend a request's blocks; nothing may be sent before the effects are carried out.

        Raises:
            NoSlotError: Every slot is taken; nothing was opened.
        """
        if not self._free_slots:
            raise NoSlotError(num_slots=len(self._generations))
        slot = self._free_slots.pop()
        publish = self._turn(slot)
        lease = Lease(
            lease_id=self._next_id,
            request_id=request_id,
            blocks=tuple(blocks),
            slot=slot,
            generation=publish.generation,
        )
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        return lease, [publish]

    # --- our own doings ----------------------------------------------------------------

    def chunk_sent(self, lease_id: int) -> None:
        """Note that a CHUNK of this lease was given to the link.

        Raises:
            LeaseStateError: The lease is unknown, declined, or past its hand-off.
        """
        self._happen(lease_id, LeaseEvent.CHUNK_SENT)

    def handoff_sent(self, lease_id: int) -> None:
        """Note that the HANDOFF of this lease was given to the link.

        Raises:
            LeaseStateError: The lease is unknown, or was handed off or aborted before.
        """
        self._happen(lease_id, LeaseEvent.HANDOFF_SENT)

    def abort(self, lease_id: int) -> list[Effect]:
        """Take a lease back because its request is over.

        It ends at once where the peer never heard of it, and with the peer's RELEASE otherwise.
        A client that has not been adopted by then is still this daemon's to answer.
        """
        return self._happen(lease_id, LeaseEvent.ABORT)

    # --- the peer's messages -----------------------------------------------------------

    def nochunk(self, lease_id: int) -> list[Effect]:
        """The peer has no room to reserve: send no more chunks of this lease."""
        return self._happen(lease_id, LeaseEvent.NOCHUNK)

    def adopt(self, lease_id: int) -> list[Effect]:
        """The peer owns the stream and the client's connection."""
        return self._happen(lease_id, LeaseEvent.ADOPT)

    def reject(self, lease_id: int) -> list[Effect]:
        """The peer did not take the HANDOFF; this implies RELEASE."""
        return self._happen(lease_id, LeaseEvent.REJECT)

    def release(self, lease_id: int) -> list[Effect]:
        """The peer will not read the blocks again."""
        return self._happen(lease_id, LeaseEvent.RELEASE)

    # --- the link's fate ---------------------------------------------------------------

    def link_lost(self, *, peer_is_gone: bool, now_s: float, grace_s: float) -> list[Effect]:
        """The link is closed, and all that the peer had sent over it was dealt with.

        Args:
            peer_is_gone: The peer's process is proved dead, so nobody reads any more.
            now_s: Monotonic time.
            grace_s: How long blocks that a peer in doubt may be reading stay in quarantine.
        """
        event = LeaseEvent.PEER_GONE if peer_is_gone else LeaseEvent.LINK_LOST
        return self._happen_to_all(self._leases, event, deadline_s=now_s + grace_s)

    def peer_gone(self) -> list[Effect]:
        """The process behind a link that was lost is proved dead: quarantine is over."""
        return self._happen_to_all(self._quarantined(), LeaseEvent.PEER_GONE)

    def link_restored(self, held: AbstractSet[int]) -> list[Effect]:
        """A new link of this epoch is up; the peer says which leases it still holds.

        What it holds stays in quarantine until it is released, expires or is lost again: it is
        revoked already.  What it believes to hold and ended long ago is `Ignored`.

        Raises:
            LeaseStateError: A lease is known to the peer and not quarantined, so the loss of the
                link before was never told.
        """
        quarantined = set(self._quarantined())
        for lease in self:
            if lease.lease_id not in quarantined and lease.state is not LeaseState.OPEN:
                raise LeaseStateError(
                    lease_id=lease.lease_id, state=lease.state.value, event="a new link"
                )
        kept = self._happen_to_all(held, LeaseEvent.HELD)
        return kept + self._happen_to_all(quarantined - held, LeaseEvent.NOT_HELD)

    def expire(self, now_s: float) -> list[Effect]:
        """End every quarantine whose time is over."""
        due = [lease_id for deadline_s, lease_id in self._deadlines() if deadline_s <= now_s]
        return self._happen_to_all(due, LeaseEvent.EXPIRED)

    # --- the books ---------------------------------------------------------------------

    def counts(self) -> dict[LeaseState, int]:
        """Return how many leases are in each state; ENDED is always 0."""
        counts = dict.fromkeys(LeaseState, 0)
        for lease in self:
            counts[lease.state] += 1
        return counts

    def check_integrity(self) -> None:
        """Check that every slot is free or one lease's; to be called when the daemon is idle.

        Raises:
            IntegrityError: A slot is lost, in two hands, or holds the wrong generation.
        """
        taken = [lease.slot for lease in self]
        if sorted(taken + self._free_slots) != list(range(len(self._generations))):
            raise IntegrityError(f"slots {taken} are taken and {self._free_slots} are free")
        for lease in self:
            revoked = lease.state is LeaseState.QUARANTINED
            if self._generations[lease.slot] != lease.generation + revoked:
                raise IntegrityError(
                    f"slot {lease.slot} is at generation {self._generations[lease.slot]}, "
                    f"and lease {lease.lease_id} ({lease.state.value}) at {lease.generation}"
                )

    def _quarantined(self) -> list[int]:
        return [lease.lease_id for lease in self if lease.state is LeaseState.QUARANTINED]

    def _deadlines(self) -> list[tuple[float, int]]:
        return [
            (lease.deadline_s, lease.lease_id) for lease in self if lease.deadline_s is not None
        ]

    def _turn(self, slot: int) -> PublishGeneration:
        """Advance a slot's generation: to an odd one for a lease, to an even one for nobody."""
        self._generations[slot] += 1
        return PublishGeneration(slot, self._generations[slot])

    def _happen_to_all(
        self, lease_ids: Iterable[int], event: LeaseEvent, *, deadline_s: float | None = None
    ) -> list[Effect]:
        """Let an event happen to some leases, oldest first."""
        return [
            effect
            for lease_id in sorted(lease_ids)
            for effect in self._happen(lease_id, event, deadline_s=deadline_s)
        ]

    def _happen(
        self, lease_id: int, event: LeaseEvent, *, deadline_s: float | None = None
    ) -> list[Effect]:
        """Take one transition, and return what it demands."""
        lease = self._leases.get(lease_id)
        edge = None if lease is None else TRANSITIONS[lease.state].get(event)
        if lease is None or edge is None:
            if event in OUR_EVENTS:
                state = "not there" if lease is None else lease.state.value
                raise LeaseStateError(lease_id=lease_id, state=state, event=event.value)
            return [Ignored(event, lease_id)]
        if edge.to is LeaseState.ENDED:
            del self._leases[lease_id]
            self._free_slots.append(lease.slot)
        else:
            if edge.outcome is not Outcome.QUARANTINE:
                deadline_s = lease.deadline_s  # a second loss of the link prolongs nothing
            self._leases[lease_id] = dataclasses.replace(
                lease, state=edge.to, deadline_s=deadline_s
            )
        return self._effects(lease, edge.outcome, event)

    def _effects(self, lease: Lease, outcome: Outcome, event: LeaseEvent) -> list[Effect]:
        """Return what an outcome demands of the caller, the revocation first."""
        match outcome:
            case Outcome.NOTHING:
                return []
            case Outcome.CLOSE_CLIENT:
                return [CloseClient(lease.lease_id)]
            case Outcome.SEND_ABORT:
                return [SendAbort(lease.lease_id)]
            case Outcome.QUARANTINE:
                return [self._turn(lease.slot), Quarantine(lease.lease_id, lease.blocks)]
            case Outcome.RETURN:
                rejected = event is LeaseEvent.REJECT
                reason = ReturnReason.REJECTED if rejected else ReturnReason.LINK_LOST
                return [
                    self._turn(lease.slot),
                    ReturnRequest(lease.lease_id, lease.request_id, reason),
                ]
            case Outcome.FREE:
                freed = FreeBlocks(lease.lease_id, lease.blocks)
                if lease.state is LeaseState.QUARANTINED:  # revoked when it got there
                    return [freed]
                return [self._turn(lease.slot), freed]
