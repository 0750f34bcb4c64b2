"""Lends blocks to decoded: carries out what the lease table decides, in the table's order.

The order is the safety: a generation is published before the blocks it guards are freed, moved or
written, so a reader that is late, stopped or dead can at worst read in vain.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

from prefilld.request import Request, RequestState
from shared.kv.allocator import BlockState
from shared.kv.holds import BlockHolds, Hold
from shared.kv.lease_states import (
    CloseClient,
    Effect,
    FreeBlocks,
    Ignored,
    PublishGeneration,
    Quarantine,
    ReturnRequest,
    SendAbort,
)
from shared.kv.leases import Lease, LeaseTable

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from prefilld.metrics import PrefillMetrics
    from shared.kv.control_page import ControlPage

LINK_LOST = "link-lost"
"""Why a request came back, where it was not a REJECT; those come back with their code."""


class LendingListener(Protocol):
    """Who is told what becomes of lent blocks and their requests."""

    def send_abort(self, lease_id: int) -> None:
        """Decoded must be told that a lease is over."""

    def blocks_freed(self) -> None:
        """Blocks came free."""

    def adopted(self, request: Request) -> None:
        """A request and its connection are decoded's now."""

    def returned(self, request: Request, cause: str, message: str) -> None:
        """A lease is over before it was adopted; the blocks are the request's again."""


class Lending:
    """The leases of one epoch.

    Args:
        leases: The table that decides.
        holds: Who has which blocks of prefilld's pool.
        control_page: Where generations are published.
        listener: Who is told.
    """

    def __init__(
        self,
        *,
        leases: LeaseTable,
        holds: BlockHolds,
        control_page: ControlPage,
        log: FilteringBoundLogger,
        metrics: PrefillMetrics,
        listener: LendingListener,
    ) -> None:
        self._leases, self._holds, self._control_page = leases, holds, control_page
        self._log, self._metrics, self._listener = log, metrics, listener
        self._requests: dict[int, Request] = {}
        """Requests that are still prefilld's and have a lease, by its id."""
        self._lent: dict[int, Hold] = {}
        """What each lease lends, until it ends; also once the request is decoded's."""
        self._request_ids: dict[int, str] = {}
        """For log lines: whose lease it is, until it ends; also once the request is decoded's."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that are still prefilld's and whose blocks are lent."""
        return tuple(self._requests.values())

    @property
    def num_sent(self) -> int:
        """Requests that were handed over and are not adopted yet."""
        return sum(request.state is RequestState.SENT for request in self.requests)

    @property
    def oldest_sent_ns(self) -> int | None:
        """When the HANDOFF left whose ADOPT is awaited longest; None where none is."""
        sent = [each.sent_ns for each in self.requests if each.state is RequestState.SENT]
        return min(sent, default=None)

    # --- our doings --------------------------------------------------------------------------

    def lend(self, request: Request) -> Lease:
        """Return the request's lease, opening one where it has none."""
        if request.lease_id is None:
            assert request.hold is not None, f"request {request.id} has no blocks to lend"
            lease, effects = self._leases.open(request.id, request.blocks)
            request.lease_id = lease.lease_id
            self._requests[lease.lease_id] = request
            self._request_ids[lease.lease_id] = request.id
            self._lent[lease.lease_id] = request.hold
            self._holds.move(request.hold, BlockState.LEASED)
            self._carry_out(effects)
            return lease
        found = self._leases.get(request.lease_id)
        assert found is not None, f"the lease of request {request.id} has ended"
        return found

    def chunk_sent(self, lease: Lease) -> None:
        """A CHUNK of this lease was given to the link."""
        self._leases.chunk_sent(lease.lease_id)

    def handoff_sent(self, lease: Lease) -> None:
        """The HANDOFF of this lease was given to the link."""
        self._leases.handoff_sent(lease.lease_id)

    def take_back(self, request: Request) -> None:
        """The request is over: drop its blocks, at once or when decoded has released them."""
        if request.lease_id is None:
            if request.hold is not None:  # else it never came so far
                self._holds.drop(request.hold)
                self._listener.blocks_freed()
            return
        self._requests.pop(request.lease_id, None)
        self._carry_out(self._leases.abort(request.lease_id))

    # --- decoded's answers -------------------------------------------------------------------

    def on_nochunk(self, lease_id: int) -> None:
        """Decoded had no room to reserve: this lease's blocks are taken at HANDOFF."""
        request = self._requests.get(lease_id)
        if request is not None:
            request.is_reserved = False
        self._carry_out(self._leases.nochunk(lease_id))

    def on_adopt(self, lease_id: int) -> None:
        """Decoded owns the stream."""
        self._carry_out(self._leases.adopt(lease_id))

    def on_release(self, lease_id: int) -> None:
        """Decoded will not read the blocks again."""
        self._carry_out(self._leases.release(lease_id))

    def on_reject(self, lease_id: int, code: str, message: str) -> None:
        """Decoded did not take the request."""
        self._carry_out(self._leases.reject(lease_id), cause=code, message=message)

    # --- the link's fate ---------------------------------------------------------------------

    def link_lost(self, *, peer_is_gone: bool, now_s: float, grace_s: float) -> None:
        """Take every lease back.

        Args:
            peer_is_gone: decoded's process is proved dead, so nobody reads any more.
            now_s: Monotonic time.
            grace_s: How long blocks that decoded may be reading stay quarantined otherwise.
        """
        effects = self._leases.link_lost(peer_is_gone=peer_is_gone, now_s=now_s, grace_s=grace_s)
        self._carry_out(effects, cause=LINK_LOST)

    def link_restored(self, held: AbstractSet[int]) -> None:
        """A new link is up; decoded says which leases it still reads, and all others are over."""
        self._carry_out(self._leases.link_restored(held))

    def peer_gone(self) -> None:
        """Decoded's process is proved dead: what was quarantined for it is free."""
        self._carry_out(self._leases.peer_gone())

    def expire(self, now_s: float) -> None:
        """Free what has been quarantined for long enough."""
        self._carry_out(self._leases.expire(now_s))

    # --- effects -----------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect], *, cause: str = "", message: str = "") -> None:
        """Do what the lease table decided.

        Args:
            effects: What the table returned.
            cause: Why requests come back: the code of a REJECT, or `LINK_LOST`.
            message: What decoded said beside its code.
        """
        has_freed = False
        for effect in effects:
            match effect:
                case PublishGeneration(slot=slot, generation=generation):
                    self._control_page.publish(slot, generation)
                case FreeBlocks(lease_id=lease_id, blocks=blocks):
                    self._holds.drop(self._lent.pop(lease_id))
                    self._log.info(
                        "lease.released",
                        request_id=self._request_ids.pop(lease_id, None),
                        lease_id=lease_id,
                        num_blocks=len(blocks),
                    )
                    has_freed = True
                case Quarantine(lease_id=lease_id, blocks=blocks):
                    self._holds.move(self._lent[lease_id], BlockState.QUARANTINED)
                    self._log.warning(
                        "lease.quarantined",
                        request_id=self._request_ids.get(lease_id),
                        lease_id=lease_id,
                        num_blocks=len(blocks),
                    )
                case SendAbort(lease_id=lease_id):
                    self._listener.send_abort(lease_id)
                case CloseClient(lease_id=lease_id):
                    # None: it was taken back while ADOPT was on its way.
                    if (request := self._requests.pop(lease_id, None)) is not None:
                        self._listener.adopted(request)
                case ReturnRequest(lease_id=lease_id):
                    self._request_ids.pop(lease_id, None)
                    self._holds.move(self._lent.pop(lease_id), BlockState.ACTIVE)
                    if (request := self._requests.pop(lease_id, None)) is not None:
                        self._returned(request, cause, message)
                case Ignored(kind=event, lease_id=lease_id):
                    self._metrics.ignored.labels(event.value).inc()
                    self._log.debug("lease.ignored", what=event.value, lease_id=lease_id)
        if has_freed:
            self._listener.blocks_freed()

    def _returned(self, request: Request, cause: str, message: str) -> None:
        request.lease_id, request.chunked_blocks, request.is_reserved = None, 0, False
        self._listener.returned(request, cause, message)
