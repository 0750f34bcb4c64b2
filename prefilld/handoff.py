"""Hands requests over: announces chunks, waits for room at decoded, sends the connection along.

Order of events for one request, and who may do what with its blocks and its connection:

    first CHUNK, or HANDOFF   a lease is open: its generation stands on the control page, its
                              blocks are LEASED, decoded may read them
    HANDOFF is given to the   the client's reader is off, every earlier byte was taken by the
    kernel                    kernel, the descriptor rode along; our duplicate stays open, silent
    ADOPT                     the stream is decoded's; our duplicate is closed
    RELEASE                   the generation changes, then the blocks are free, or kept as cache
    REJECT, or the link is    the generation changes, the blocks are the request's again, and it
    lost before ADOPT         waits for the next decoded; reading the client goes on

A HANDOFF is sent only where decoded has told that it has room, so requests wait here, in order,
until it has.  A client that is slow to take its first token holds up nobody but itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefilld.credits import CreditAccount
from prefilld.handoff_listeners import LinkSender, RequestOwner
from prefilld.handoff_messages import chunk_message, first_step, handoff_message
from prefilld.lending import LINK_LOST, Lending
from prefilld.request import Request, RequestState
from protocol import messages as wire
from shared.clock import NS_PER_S, whole_us

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from prefilld.metrics import PrefillMetrics
    from shared.clock import Clock
    from shared.kv.control_page import ControlPage
    from shared.kv.holds import BlockHolds
    from shared.kv.leases import LeaseTable


class HandoffDesk:
    """The requests that wait to be handed over, and those whose ADOPT is awaited.

    Args:
        epoch: The pool's.
        block_size: Tokens in a block.
        leases: Which blocks decoded may read, and under what generation.
        holds: Who has which blocks of prefilld's pool.
        control_page: Where generations are published.
    """

    def __init__(
        self,
        *,
        epoch: bytes,
        block_size: int,
        leases: LeaseTable,
        holds: BlockHolds,
        control_page: ControlPage,
        clock: Clock,
        log: FilteringBoundLogger,
        metrics: PrefillMetrics,
    ) -> None:
        self._epoch, self._block_size = epoch, block_size
        self._clock, self._log, self._metrics = clock, log, metrics
        self.lending = Lending(
            leases=leases,
            holds=holds,
            control_page=control_page,
            log=log,
            metrics=metrics,
            listener=self,
        )
        self._owner: RequestOwner | None = None
        self._link: LinkSender | None = None
        self._is_direct = False
        self._credits = CreditAccount()
        self._is_peer_draining = False
        self._ready: list[Request] = []

    def attach(self, owner: RequestOwner) -> None:
        """Name the owner of the requests; once, before anything else."""
        self._owner = owner

    # --- the link ----------------------------------------------------------------------------

    def link_opened(
        self,
        link: LinkSender,
        held: Sequence[int],
        *,
        is_direct: bool = False,
        pool_blocks: int | None = None,
    ) -> None:
        """Start to hand over through a link that was proved.

        Args:
            link: Where to send.
            held: Leases of this epoch that decoded still reads; all others have ended.
            is_direct: decoded reads whole blocks in place; there is nothing to pull ahead, and a
                CHUNK only lets it begin early.
            pool_blocks: Most that decoded's pool can have for a sequence; None is not known.
        """
        self._link, self._is_direct = link, is_direct
        self._credits = CreditAccount(pool_blocks)
        self._is_peer_draining = False
        self.lending.link_restored(frozenset(held))

    def link_lost(self, *, peer_is_gone: bool, grace_s: float) -> None:
        """Take every lease back; called after the link's queue was read to its end."""
        self._link = None
        now_s = self._clock.monotonic_ns() / NS_PER_S
        self.lending.link_lost(peer_is_gone=peer_is_gone, now_s=now_s, grace_s=grace_s)

    def peer_drains(self) -> None:
        """Decoded takes only what it has reserved room for; others wait for its successor."""
        self._is_peer_draining = True

    def update_credits(self, room: wire.Credits) -> None:
        """Take decoded's word for its room; see `CreditAccount.update`."""
        self._credits.update(
            free_blocks=room.free_blocks, free_sequences=room.free_sequences, seen=room.seen
        )

    # --- requests ----------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Requests that wait to be handed over."""
        return len(self._ready)

    def announce(self, request: Request, event: int | None = None) -> None:
        """Tell decoded which blocks of a running prefill it may pull.

        Nothing is sent, and HANDOFF will name all blocks, where there is no link or no room.

        Args:
            request: Whose blocks.
            event: The slot of the event after which all launched tokens are in them; None where
                only what is computed already shall be named.
        """
        num_tokens = request.computed_tokens if event is None else request.launched_tokens
        num_complete = num_tokens // self._block_size
        is_last = event is not None and num_tokens == request.num_tokens
        if is_last:
            num_complete = len(request.blocks)  # nothing more will be written to the last one
        step = first_step(request.prompt) if is_last else None
        if self._link is None or num_complete <= request.chunked_blocks:
            return
        if self._is_direct and step is None:
            return  # there is nothing to copy ahead
        if request.lease_id is None:
            if self._is_peer_draining:
                return
            # Room that an older request waits for must not be reserved past it.
            is_owed = any(not ready.is_reserved for ready in self._ready)
            if is_owed or not self._credits.covers(self._room_for(request)):
                return
            self._credits.spend(self._room_for(request))
            request.is_reserved = True
        if not request.is_reserved:
            return  # decoded answered NOCHUNK
        lease = self.lending.lend(request)
        self.lending.chunk_sent(lease)
        message = chunk_message(
            request,
            lease,
            self._epoch,
            num_complete=num_complete,
            event=event,
            first_step=step,
        )
        if step is not None:
            request.first_token_place = lease.slot, lease.generation
        self._link.send(message)
        request.chunked_blocks = num_complete
        self._metrics.chunks.inc()
        self._log.debug(
            "chunk.sent",
            request_id=request.id,
            lease_id=lease.lease_id,
            num_chunked=num_complete,
            ring_slot=event,
        )

    def ready(self, request: Request) -> None:
        """Queue a request whose first token is known; `pump` hands it over."""
        request.state = RequestState.READY
        self._ready.append(request)
        # One that came back from a dead link goes where its age puts it.
        self._ready.sort(key=lambda waiting: waiting.arrived_ns)

    def withdraw(self, request: Request) -> None:
        """Take a request out that ended here: cancelled, failed, or answered by its first token.

        A request that was SENT cannot be withdrawn: it may be decoded's already.
        """
        if request in self._ready:
            self._ready.remove(request)
        request.state = RequestState.ENDED
        self.lending.take_back(request)

    def pump(self) -> None:
        """Hand over what decoded has room for, oldest first.

        A request whose room is reserved can always go.  Among the others nobody overtakes, or
        small ones would starve a large one; but one whose client is slow to take its first token
        is passed by.
        """
        is_room_owed = False
        for request in tuple(self._ready):
            if self._link is None or self._credits.are_doubted(self._clock.monotonic_ns()):
                return
            if self._is_peer_draining and not request.is_reserved:
                continue
            if not request.client.is_flushed:
                continue
            has_room = request.is_reserved or (
                not is_room_owed and self._credits.covers(self._room_for(request))
            )
            if has_room:
                self._hand_over(request, self._link)
            else:
                is_room_owed = True

    def _room_for(self, request: Request) -> int:
        prompt = request.prompt
        return prompt.start_blocks - prompt.num_in_place(
            self._block_size, is_direct=self._is_direct
        )

    def _hand_over(self, request: Request, link: LinkSender) -> None:
        if request.is_reserved:
            self._credits.spend_reserved()
        else:
            self._credits.spend(self._room_for(request))
        lease = self.lending.lend(request)
        self.lending.handoff_sent(lease)
        self._ready.remove(request)
        request.state = RequestState.SENT
        request.sent_ns = self._clock.monotonic_ns()
        self._metrics.ready_seconds.observe((request.sent_ns - request.first_token_ns) / NS_PER_S)
        detached = request.client.detach()
        handoff = handoff_message(request, lease, self._epoch, residue=detached.residue)
        link.send(handoff, (detached.socket.fileno(),))
        self._metrics.handoffs.inc()
        self._log.info(
            "handoff.sent",
            request_id=request.id,
            lease_id=lease.lease_id,
            num_blocks=len(request.blocks),
            num_chunked=request.chunked_blocks,
            prefill_us=whole_us(request.first_token_ns - request.started_ns),
            prefill_device_us=whole_us(request.prefill_device_ns),
        )

    # --- what becomes of leases --------------------------------------------------------------

    def send_abort(self, lease_id: int) -> None:
        """Tell decoded that a lease is over."""
        if self._link is not None:
            self._link.send(wire.Abort(epoch=self._epoch, lease=lease_id))

    def blocks_freed(self) -> None:
        """Let the next request have the blocks."""
        self._tell.wake()

    def adopted(self, request: Request) -> None:
        """Close our duplicate of the connection: it is decoded's."""
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
        self._tell.adopted(request)

    def returned(self, request: Request, cause: str, message: str) -> None:
        """Take the connection of a request back that decoded did not adopt."""
        if request.state is not RequestState.SENT:
            return  # its prefill is still running, or it waits in the queue already
        request.client.take_back()
        self._metrics.returned.labels(cause).inc()
        self._log.warning("handoff.returned", request_id=request.id, cause=cause, said=message)
        if cause == LINK_LOST:
            self.ready(request)
        else:
            self._credits.rejected(self._clock.monotonic_ns())
            self._tell.rejected(request, cause, message)

    @property
    def _tell(self) -> RequestOwner:
        assert self._owner is not None, "`attach` comes first"
        return self._owner
