"""Understands what comes over links, and chooses what is copied for it.

A message becomes a question to its link's book of leases (`intake.py`), and so does the end of a
copy; what the book decides is carried out by `lease_desk.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from decoded.early_step import EarlyStep
from decoded.in_place_desk import InPlaceDesk
from decoded.intake import Intake
from decoded.lease_desk import LeaseDesk
from decoded.lease_effects import CopyTimes
from decoded.links import Links
from decoded.sequence import Sequence
from decoded.stream import ClientStream
from shared.clock import NS_PER_S, whole_us
from shared.daemon.sampling import sampling_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from decoded.lease_effects import BlockCopy
    from decoded.link import LinkSession
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequences import SequenceBook
    from decoded.step_result import StepResult
    from decoded.turns import CopyDone
    from protocol import messages as wire
    from shared.service.frame import Service


class AdoptionDesk:
    """All links, and what they bring.

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
        self.in_place = InPlaceDesk(
            scheduler=scheduler, book=book, credits=self.links.credits, on_work=on_work
        )
        """What is read where it is, and how it is moved when prefilld dies."""
        self.leases = LeaseDesk(
            service=service,
            scheduler=scheduler,
            book=book,
            metrics=metrics,
            links=self.links,
            in_place=self.in_place,
            on_work=on_work,
        )
        """What leases come to, and sequences that have not started."""

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
        self.leases.carry_out(session, effects)

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
        self.leases.carry_out(session, effects)

    def on_abort(self, session: LinkSession, message: wire.Abort) -> None:
        """Give a lease back that prefilld wants back."""
        self.leases.carry_out(session, session.intake.abort(message.lease))

    def on_lost(self, session: LinkSession) -> None:
        """Go on without a link."""
        self._metrics.links_lost.inc()
        self.leases.link_lost(session)
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
                    self.leases.carry_out(session, session.intake.copied(copy, is_valid=False))
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
            device_us=whole_us(done.device_ns),
        )
        if self.in_place.has_copy(session, copy):
            self.in_place.copied(session, copy, is_valid=is_valid)
            return
        effects = session.intake.copied(
            copy,
            is_valid=is_valid,
            times=CopyTimes(start_ns=done.start_ns, done_ns=done.done_ns, device_ns=done.device_ns),
        )
        self.leases.carry_out(session, effects)

    def early_done(self, session: LinkSession, copy: BlockCopy, result: StepResult) -> None:
        """Take note of what the step behind a copy brought; its lease may have waited for that."""
        assert copy.early is not None, "only such a copy has begun a step"
        copy.early.is_in_flight, copy.early.result = False, result
        effects = session.intake.early_done(copy.lease_id)
        if effects:  # most often its sequence has started, and there is nothing to look at
            self.leases.carry_out(session, effects)


def _early_step(told: wire.FirstStep | None) -> EarlyStep | None:
    if told is None:
        return None
    return EarlyStep(position=told.num_tokens, sampling=sampling_params(told.sampling))
