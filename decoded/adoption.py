"""Adopts what comes over links: reserves, answers, starts sequences whose blocks are pulled.

One book of leases a link decides (`intake.py`); here its decisions are carried out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from decoded.early_step import EarlyStep
from decoded.in_place_desk import InPlaceDesk
from decoded.intake import Intake
from decoded.lease_effects import (
    BlockCopy,
    Effect,
    Ignored,
    Lost,
    Pulled,
    SendAdopt,
    SendNoChunk,
    SendReject,
    SendRelease,
    Unreserve,
)
from decoded.links import Links
from decoded.sequence import Sequence
from decoded.stream import ClientStream
from protocol import messages as wire
from shared.clock import NS_PER_S
from shared.daemon.sampling import sampling_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from decoded.link import LinkSession
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequences import SequenceBook
    from decoded.turns import CopyDone
    from shared.service.frame import Service


class AdoptionDesk:
    """All links, and what they brought.

    Args:
        service: Clock and log.
        scheduler: The room that is left.
        book: The adopted sequences.
        token_bytes: What a token adds to a text.
        block_size: Tokens in a block.
        on_work: Called when there may be something to copy or to decode.
    """

    def __init__(
        self,
        *,
        service: Service,
        scheduler: Scheduler[Sequence],
        book: SequenceBook,
        metrics: DecodeMetrics,
        token_bytes: Callable[[int], bytes],
        block_size: int,
        on_work: Callable[[], None],
    ) -> None:
        self._service, self._scheduler, self._book = service, scheduler, book
        self._metrics, self._token_bytes, self._on_work = metrics, token_bytes, on_work
        self._block_size = block_size
        self._loop = asyncio.get_running_loop()
        self.links = Links(scheduler)
        self._came_over: dict[Sequence, LinkSession] = {}
        """The link of each sequence whose blocks are not all pulled."""
        self._unconfirmed: dict[Sequence, LinkSession] = {}
        """The link of each sequence whose ADOPT the kernel has not accepted whole."""
        self._begun: list[EarlyStep] = []
        self.in_place = InPlaceDesk(
            scheduler=scheduler, book=book, credits=self.links.credits, on_work=on_work
        )
        """What is read where it is, and how it is moved when prefilld dies."""

    # --- links -------------------------------------------------------------------------------

    def new_intake(self, *, is_direct: bool) -> Intake[Sequence]:
        """Return the book of leases for a new link."""
        return Intake(
            reserve=self._scheduler.reserve, block_size=self._block_size, is_direct=is_direct
        )

    def credits(self, session: LinkSession) -> wire.Credits:
        """Return what can still be taken, for a frame on that link."""
        return self.links.credits(session)

    def tick(self) -> None:
        """Look after the links: is the peer there, and is a lost one's mapping still needed?"""
        self.links.tick(self.in_place)

    def may_read_in_place(self, session: LinkSession) -> bool:
        """Whether no other link's pool is mapped: engines read one pool in place at a time."""
        return self.links.is_alone(session)

    # --- what comes over them ----------------------------------------------------------------

    def on_chunk(self, session: LinkSession, message: wire.Chunk) -> None:
        """Pull blocks of a prompt that is still being computed."""
        self._service.log.debug(
            "chunk.received",
            lease_id=message.lease,
            num_blocks=len(message.blocks),
            ring_slot=message.event,
        )
        effects = session.intake.chunk(
            lease_id=message.lease,
            slot=message.slot,
            generation=message.generation,
            first=message.first,
            blocks=message.blocks,
            total=message.total_blocks,
            event=message.event,
            early=_early_step(message.first_step),
        )
        self.carry_out(session, effects)

    def on_handoff(
        self, session: LinkSession, message: wire.Handoff, descriptor: int | None
    ) -> None:
        """Adopt a request, or say why not."""
        now_ns = self._service.clock.monotonic_ns()
        sequence: Sequence
        stream = ClientStream(
            descriptor,
            residue=message.residue,
            is_streaming=message.request.stream,
            loop=self._loop,
            on_cancel=lambda: self._book.cancel(sequence),
            on_closed=lambda: self._book.client_gone(sequence),
            now_s=now_ns / NS_PER_S,
        )
        sequence, piece = Sequence.adopt(
            message,
            stream=stream,
            token_bytes=self._token_bytes,
            block_size=self._block_size,
            adopted_ns=now_ns,
        )
        stream.push(piece, sequence.take_logprobs(piece))
        intake, lease_id = session.intake, message.lease
        most_tokens = message.request.prompt_tokens + message.request.max_tokens
        most_blocks = -(-most_tokens // self._block_size) - intake.num_in_place(message.num_tokens)
        num_lacking = most_blocks - self._scheduler.capacity
        if descriptor is None:
            effects = intake.refuse(lease_id, "fd-lost", "the descriptor did not arrive", sequence)
        elif num_lacking > 0:
            text = f"decoded's pool lacks {num_lacking} blocks for prompt and answer"
            effects = intake.refuse(lease_id, "too-large", text, sequence)
        else:
            effects = intake.handoff(
                lease_id=lease_id,
                slot=message.slot,
                generation=message.generation,
                blocks=message.blocks,
                total=message.total_blocks,
                request=sequence,
                num_tokens=message.num_tokens,
                first_token=message.request.ids[-1],
            )
        self.carry_out(session, effects)

    def on_abort(self, session: LinkSession, message: wire.Abort) -> None:
        """Give a lease back that prefilld wants back."""
        self.carry_out(session, session.intake.abort(message.lease))

    def on_lost(self, session: LinkSession) -> None:
        """Drop what was only reserved; go on with what was adopted.

        A stream whose ADOPT the kernel did not accept whole is not ours: prefilld hands it to
        another decoded, or its client asks again.
        """
        self._metrics.links_lost.inc()
        self.carry_out(session, session.intake.link_lost())
        for sequence, owner in tuple(self._unconfirmed.items()):
            if owner is session:
                del self._unconfirmed[sequence]
                sequence.stream.abandon()
                self._book.client_gone(sequence)
        self._on_work()  # what is read in place is to be moved

    # --- copies ------------------------------------------------------------------------------

    def next_copies(self, max_blocks: int) -> list[tuple[LinkSession, BlockCopy]]:
        """Choose what to copy next; what was revoked already is not copied at all."""
        chosen: list[tuple[LinkSession, BlockCopy]] = []
        for session in self.links.sessions:
            for copy in session.intake.next_copies(max_blocks):
                if session.peer_pool.is_valid(copy):
                    max_blocks -= len(copy.sources)
                    chosen.append((session, copy))
                else:
                    self.carry_out(session, session.intake.copied(copy, is_valid=False))
        return [*chosen, *self.in_place.next_copies(max_blocks)]

    def copied(self, session: LinkSession, copy: BlockCopy, done: CopyDone) -> None:
        """Believe a complete copy, if its lease still stands now."""
        if copy.early is not None:
            copy.early.is_in_flight = done.has_begun_step
        is_valid = done.is_complete and session.peer_pool.is_valid(copy)
        if not is_valid:
            self._metrics.voided.inc()
        self._service.log.debug(
            "chunk.pulled" if is_valid else "chunk.voided",
            lease_id=copy.lease_id,
            num_blocks=len(copy.sources),
            start_ns=done.start_ns,
            done_ns=done.done_ns,
        )
        if self.in_place.has_copy(session, copy):
            self.in_place.copied(session, copy, is_valid=is_valid)
            return
        effects = session.intake.copied(
            copy, is_valid=is_valid, start_ns=done.start_ns, done_ns=done.done_ns
        )
        self.carry_out(session, effects)

    def early_done(self, session: LinkSession, lease_id: int) -> None:
        """Look whether a lease waited for its early step to end."""
        self.carry_out(session, session.intake.early_done(lease_id))

    def take_begun(self) -> list[EarlyStep]:
        """Return steps that were over before their sequences started, and now have one."""
        begun, self._begun = self._begun, []
        return begun

    def cancel_pull(self, sequence: Sequence) -> None:
        """Give the lease of a cancelled sequence back, if its blocks are not pulled yet."""
        session = self._came_over.pop(sequence, None)
        if session is not None:
            self.carry_out(session, session.intake.cancel(sequence.lease_id))

    # --- effects -----------------------------------------------------------------------------

    def carry_out(self, session: LinkSession, effects: Iterable[Effect[Sequence]]) -> None:
        """Do what a link's book of leases decided, in its order."""
        for effect in effects:
            match effect:
                case SendNoChunk(lease_id=lease_id):
                    self._answer(session, wire.NoChunk, lease_id)
                case SendAdopt(lease_id=lease_id, request=sequence):
                    self._adopt(session, lease_id, sequence)
                case SendReject():
                    self._reject(session, effect)
                case SendRelease(lease_id=lease_id):
                    self._answer(session, wire.Release, lease_id)
                case Unreserve(blocks=blocks):
                    self._scheduler.unreserve(blocks)
                case Pulled():
                    self._start(effect)
                case Lost(request=sequence):
                    del self._came_over[sequence]
                    self._book.fail(sequence, "prefill-lost", "the prompt's blocks were revoked")
                case Ignored(kind=kind, lease_id=lease_id):
                    self._metrics.ignored.labels(kind).inc()
                    self._service.log.debug("lease.ignored", what=kind, lease_id=lease_id)
        self._on_work()

    def _answer(
        self, session: LinkSession, kind: type[wire.NoChunk | wire.Release], lease_id: int
    ) -> None:
        credits = self.credits(session)
        session.send(kind(epoch=session.epoch, lease=lease_id, credits=credits))

    def _adopt(self, session: LinkSession, lease_id: int, sequence: Sequence) -> None:
        self._book.add(sequence)
        self._came_over[sequence] = self._unconfirmed[sequence] = session
        self._metrics.adopted.inc()
        self._service.log.info(
            "handoff.adopted",
            request_id=sequence.state.id,
            lease_id=lease_id,
            prompt_tokens=sequence.state.prompt_tokens,
        )
        session.send(
            wire.Adopt(epoch=session.epoch, lease=lease_id, credits=self.credits(session)),
            on_sent=lambda: self._confirmed(sequence),
        )

    def _confirmed(self, sequence: Sequence) -> None:
        """The stream is ours from now on."""
        self._unconfirmed.pop(sequence, None)
        sequence.stream.activate()

    def _reject(self, session: LinkSession, effect: SendReject[Sequence]) -> None:
        effect.request.stream.abandon()
        self._metrics.rejected.labels(effect.code).inc()
        self._service.log.warning(
            "handoff.rejected",
            request_id=effect.request.state.id,
            lease_id=effect.lease_id,
            code=effect.code,
            reason=effect.message,
        )
        session.send(
            wire.Reject(
                epoch=session.epoch,
                lease=effect.lease_id,
                code=effect.code,
                message=effect.message,
                credits=self.credits(session),
            )
        )

    def _start(self, effect: Pulled[Sequence]) -> None:
        sequence = effect.request
        session = self._came_over.pop(sequence, None)
        sequence.settle(effect.blocks, effect.in_place)
        sequence.times.copy_start_ns = effect.copy_start_ns
        sequence.times.copy_done_ns = effect.copy_done_ns
        if effect.early is not None:
            sequence.go_on_from(effect.early)
            if effect.early.result is not None:
                self._begun.append(effect.early)
        sequence.has_started = True
        self._scheduler.start(sequence)
        if effect.in_place and session is not None:
            self.in_place.add(session, effect)
        waited_ns = max(0, effect.copy_done_ns - sequence.times.adopted_ns)
        self._metrics.pull_seconds.observe(waited_ns / NS_PER_S)
        self._service.log.info(
            "lease.pulled",
            request_id=sequence.state.id,
            lease_id=sequence.lease_id,
            waited_us=waited_ns // 1000,
        )


def _early_step(told: wire.FirstStep | None) -> EarlyStep | None:
    if told is None:
        return None
    return EarlyStep(position=told.num_tokens, sampling=sampling_params(told.sampling))
