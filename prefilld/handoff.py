"""Hands prompts over: opens leases, sends CHUNK and HANDOFF, and settles what comes back.

Order of events for one request, and who may do what with its blocks and its connection:

    first CHUNK, or HANDOFF   a lease is open: its generation stands on the control page, its blocks
                              are LEASED, decoded may read them
    HANDOFF is given to the   the client's reader is off, every earlier byte was taken by the kernel,
    kernel                    the descriptor rode along; our duplicate stays open, silent
    ADOPT                     the stream is decoded's; our duplicate is closed
    RELEASE                   the generation changes, then the blocks are free
    REJECT, or the link is    the generation changes, the blocks are the request's again, and it waits
    lost before ADOPT         for the next decoded; reading the client goes on

A HANDOFF is sent only where decoded has told that it has room, so requests wait here, in order, until
it has.  A client that is slow to take its first token holds up nobody but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from prefilld.credits import CreditAccount
from prefilld.request import Request, RequestState
from protocol import messages as wire
from shared.clock import NS_PER_S
from shared.kv.allocator import BlockAllocator, BlockState
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
    from shared.clock import Clock
    from shared.kv.control_page import ControlPage


class LinkSender(Protocol):
    """What the desk needs of an open link."""

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message, with descriptors on its first byte."""


class HandoffDesk:
    """All leases of one epoch, and the requests that wait for room at decoded.

    Args:
        epoch: The pool's.
        block_size: Tokens in a block.
        leases: Which blocks decoded may read, and under what generation.
        allocator: prefilld's pool.
        control_page: Where generations are published.
        on_blocks_freed: Called after blocks came free.
        on_adopted: Called with a request that is decoded's now.
        on_rejected: Called with a request that decoded did not take, with code and reason; it
            puts the request back with `ready`, or fails it with `withdraw`.
    """

    def __init__(
        self,
        *,
        epoch: bytes,
        block_size: int,
        leases: LeaseTable,
        allocator: BlockAllocator,
        control_page: ControlPage,
        clock: Clock,
        log: FilteringBoundLogger,
        metrics: PrefillMetrics,
        on_blocks_freed: Callable[[], None],
        on_adopted: Callable[[Request], None],
        on_rejected: Callable[[Request, str, str], None],
    ) -> None:
        self._epoch, self._block_size = epoch, block_size
        self._leases = leases
        self._allocator = allocator
        self._control_page = control_page
        self._clock, self._log, self._metrics = clock, log, metrics
        self._on_blocks_freed = on_blocks_freed
        self._on_adopted, self._on_rejected = on_adopted, on_rejected
        self._link: LinkSender | None = None
        self._credits = CreditAccount()
        self._is_peer_draining = False
        self._ready: list[Request] = []
        self._leased: dict[int, Request] = {}
        """Requests that are still ours and have a lease, by its id."""

    # --- the link ------------------------------------------------------------------------

    def link_opened(self, link: LinkSender, held: Sequence[int]) -> None:
        """Start to hand over through a link that was proved.

        Args:
            link: Where to send.
            held: Leases of this epoch that decoded still reads; all others have ended.
        """
        self._link = link
        self._credits = CreditAccount()
        self._is_peer_draining = False
        self._carry_out(self._leases.link_restored(set(held)))

    def link_lost(self, *, peer_is_gone: bool, grace_s: float) -> None:
        """Take every lease back.

        Called after the link's queue was read to its end, so that what was adopted is known.

        Args:
            peer_is_gone: decoded's process is proved dead, so nobody reads any more.
            grace_s: Otherwise, how long its blocks stay quarantined.
        """
        self._link = None
        effects = self._leases.link_lost(
            peer_is_gone=peer_is_gone, now_s=self._now_s(), grace_s=grace_s
        )
        self._carry_out(effects, cause="link-lost")

    def peer_gone(self) -> None:
        """Decoded's process is proved dead: what was quarantined for it is free."""
        self._carry_out(self._leases.peer_gone())

    def expire(self) -> None:
        """Free what has been quarantined for long enough."""
        self._carry_out(self._leases.expire(self._now_s()))

    def peer_drains(self) -> None:
        """Decoded will take nothing new; requests wait for its successor."""
        self._is_peer_draining = True

    def update_credits(self, room: wire.Credits) -> None:
        """Take decoded's word for its room.

        Raises:
            ValueError: decoded has counted more than was sent.
        """
        self._credits.update(
            free_blocks=room.free_blocks, free_sequences=room.free_sequences, seen=room.seen
        )

    # --- requests -------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Requests that wait to be handed over."""
        return len(self._ready)

    @property
    def num_sent(self) -> int:
        """Requests that were handed over and are not adopted yet."""
        return sum(request.state is RequestState.SENT for request in self._leased.values())

    @property
    def has_link(self) -> bool:
        """Whether a link is open."""
        return self._link is not None

    def announce(self, request: Request) -> None:
        """Tell decoded which blocks of a running prefill are complete, so that it pulls them.

        Nothing is sent, and HANDOFF will name all blocks, where there is no link or no room.
        """
        num_complete = request.computed_tokens // self._block_size
        if self._link is None or self._is_peer_draining or num_complete <= request.chunked_blocks:
            return
        if request.lease_id is None:
            if not self._credits.covers(request.prompt.total_blocks):
                return
            self._open_lease(request)
            self._credits.spend(request.prompt.total_blocks)
            request.is_reserved = True
        if not request.is_reserved:
            return
        lease = self._lease_of(request)
        self._leases.chunk_sent(lease.lease_id)
        self._link.send(
            wire.Chunk(
                epoch=self._epoch,
                lease=lease.lease_id,
                slot=lease.slot,
                generation=lease.generation,
                first=request.chunked_blocks,
                blocks=request.blocks[request.chunked_blocks : num_complete],
                total_blocks=request.prompt.total_blocks,
            )
        )
        request.chunked_blocks = num_complete
        self._metrics.chunks.inc()

    def ready(self, request: Request) -> None:
        """Queue a request whose first token is known; `pump` hands it over."""
        request.state = RequestState.READY
        self._ready.append(request)
        # One that came back from a dead link goes where its age puts it.
        self._ready.sort(key=lambda waiting: waiting.arrived_ns)

    def withdraw(self, request: Request) -> None:
        """Take a request out that ended here: cancelled, failed, or answered by its first token.

        Its blocks come free, at once or when decoded has released them.  A request that was
        SENT cannot be withdrawn: it may be decoded's already.
        """
        if request in self._ready:
            self._ready.remove(request)
        request.state = RequestState.ENDED
        if request.lease_id is None:
            self._allocator.free(request.blocks)
            self._on_blocks_freed()
            return
        self._leased.pop(request.lease_id, None)
        self._carry_out(self._leases.abort(request.lease_id))

    def pump(self) -> None:
        """Hand over what decoded has room for, oldest first."""
        if self._link is None or self._is_peer_draining:
            return
        for request in list(self._ready):
            if not request.is_reserved and not self._credits.covers(request.prompt.total_blocks):
                return  # nobody overtakes: a small request must not starve a large one
            if request.client.is_flushed:
                self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        assert self._link is not None
        if request.lease_id is None:
            self._open_lease(request)
        if request.is_reserved:
            self._credits.spend_reserved()
        else:
            self._credits.spend(request.prompt.total_blocks)
        lease = self._lease_of(request)
        self._leases.handoff_sent(lease.lease_id)
        self._ready.remove(request)
        request.state = RequestState.SENT
        request.sent_ns = self._clock.monotonic_ns()
        detached = request.client.detach()
        self._link.send(
            wire.Handoff(
                epoch=self._epoch,
                lease=lease.lease_id,
                slot=lease.slot,
                generation=lease.generation,
                blocks=request.blocks,
                num_tokens=request.num_tokens,
                total_blocks=request.prompt.total_blocks,
                request=_state_of(request),
                residue=detached.residue,
                sent_ns=request.sent_ns,
            ),
            (detached.socket.fileno(),),
        )
        self._metrics.handoffs.inc()
        self._log.info(
            "handoff.sent",
            request_id=request.id,
            lease_id=lease.lease_id,
            num_blocks=len(request.blocks),
            num_chunked=request.chunked_blocks,
        )

    # --- decoded's answers ----------------------------------------------------------------

    def on_nochunk(self, lease_id: int) -> None:
        """Decoded had no room to reserve: this lease's blocks are taken at HANDOFF."""
        request = self._leased.get(lease_id)
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

    # --- effects --------------------------------------------------------------------------

    def _open_lease(self, request: Request) -> None:
        lease, effects = self._leases.open(request.id, request.blocks)
        request.lease_id = lease.lease_id
        self._leased[lease.lease_id] = request
        self._allocator.move(request.blocks, BlockState.LEASED)
        self._carry_out(effects)

    def _lease_of(self, request: Request) -> Lease:
        lease = None if request.lease_id is None else self._leases.get(request.lease_id)
        assert lease is not None, f"request {request.id} has no lease"
        return lease

    def _carry_out(self, effects: Sequence[Effect], *, cause: str = "", message: str = "") -> None:
        """Do what the lease table decided, in its order.

        Args:
            effects: What the table returned.
            cause: Why requests come back: the code of a REJECT, or `link-lost`.
            message: What decoded said beside its code.
        """
        has_freed = False
        for effect in effects:
            match effect:
                case PublishGeneration(slot=slot, generation=generation):
                    self._control_page.publish(slot, generation)
                case FreeBlocks(lease_id=lease_id, blocks=blocks):
                    self._allocator.free(blocks)
                    self._log.info("lease.released", lease_id=lease_id, num_blocks=len(blocks))
                    has_freed = True
                case Quarantine(lease_id=lease_id, blocks=blocks):
                    self._allocator.move(blocks, BlockState.QUARANTINED)
                    self._log.warning(
                        "lease.quarantined", lease_id=lease_id, num_blocks=len(blocks)
                    )
                case SendAbort(lease_id=lease_id):
                    if self._link is not None:
                        self._link.send(wire.Abort(epoch=self._epoch, lease=lease_id))
                case CloseClient(lease_id=lease_id):
                    self._adopted(self._leased.pop(lease_id))
                case ReturnRequest(lease_id=lease_id):
                    self._returned(self._leased.pop(lease_id), cause, message)
                case Ignored(kind=event, lease_id=lease_id):
                    self._metrics.ignored.labels(event.value).inc()
                    self._log.debug("lease.ignored", what=event.value, lease_id=lease_id)
        if has_freed:
            self._on_blocks_freed()

    def _adopted(self, request: Request) -> None:
        request.state = RequestState.ENDED
        request.client.drop_duplicate()
        waited_ns = self._clock.monotonic_ns() - request.sent_ns
        self._metrics.adopted.inc()
        self._metrics.adopt_seconds.observe(waited_ns / NS_PER_S)
        self._log.info(
            "handoff.adopted",
            request_id=request.id,
            lease_id=request.lease_id,
            waited_us=waited_ns // 1000,
        )
        self._on_adopted(request)

    def _returned(self, request: Request, cause: str, message: str) -> None:
        """The lease is over, its blocks are the request's again."""
        self._allocator.move(request.blocks, BlockState.ACTIVE)
        request.lease_id, request.chunked_blocks, request.is_reserved = None, 0, False
        if request.state is not RequestState.SENT:
            return  # its prefill is still running, or it waits in the queue already
        request.client.take_back()
        self._metrics.returned.labels(cause).inc()
        self._log.warning("handoff.returned", request_id=request.id, cause=cause, said=message)
        if cause == "link-lost":
            self.ready(request)
        else:
            self._on_rejected(request, cause, message)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S


def _state_of(request: Request) -> wire.RequestState:
    prompt = request.prompt
    return wire.RequestState(
        id=request.id,
        prompt_tokens=len(prompt.ids),
        cached_tokens=0,
        ids=request.answer_ids,
        delivered=request.delivered,
        resumed=len(prompt.resumed_ids),
        max_tokens=prompt.max_tokens,
        sampling=prompt.sampling,
        stop=prompt.stop,
        stop_ids=prompt.stop_ids,
        stream=prompt.stream,
        arrived_ns=request.arrived_ns,
        started_ns=request.started_ns,
        first_token_ns=request.first_token_ns,
    )
