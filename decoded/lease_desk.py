"""Carries out what the books of leases decide: ADOPT, REJECT, RELEASE, and the start of a sequence.

Each link's book (`intake.py`) returns effects; here they become frames, sequences and counts.
Between ADOPT and its start a sequence is known by its link alone, which is why this desk keeps
both: a lost link's ADOPT may never have left, and a cancelled client's lease is to be given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.lease_effects import (
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
from protocol import messages as wire
from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from decoded.early_step import EarlyStep
    from decoded.in_place_desk import InPlaceDesk
    from decoded.link import LinkSession
    from decoded.links import Links
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook
    from decoded.step_result import StepResult
    from shared.service.frame import Service


class LeaseDesk:
    """What leases of all links come to.

    Args:
        service: Log.
        scheduler: Where reservations go back to, and sequences start.
        book: The adopted sequences.
        links: Know what can still be taken, for a frame on a link.
        in_place: Who goes on to read what was not copied.
        on_work: Called when there may be something to copy or to decode.
    """

    def __init__(
        self,
        *,
        service: Service,
        scheduler: Scheduler[Sequence],
        book: SequenceBook,
        metrics: DecodeMetrics,
        links: Links,
        in_place: InPlaceDesk,
        on_work: Callable[[], None],
    ) -> None:
        self._service, self._scheduler, self._book = service, scheduler, book
        self._metrics, self._links, self._in_place = metrics, links, in_place
        self._on_work = on_work
        self._came_over: dict[Sequence, LinkSession] = {}
        """The link of each sequence whose blocks are not all pulled."""
        self._unconfirmed: dict[Sequence, LinkSession] = {}
        """The link of each sequence whose ADOPT the kernel has not accepted whole."""
        self._begun: dict[EarlyStep, Sequence] = {}
        """Whose first step was launched before it started, and did not bring its token yet."""

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
                case Lost(request=sequence, reason=reason):
                    del self._came_over[sequence]
                    self._book.fail(sequence, "prefill-lost", reason)
                case Ignored(kind=kind, lease_id=lease_id):
                    self._metrics.ignored.labels(kind).inc()
                    self._service.log.debug("lease.ignored", what=kind, lease_id=lease_id)
        self._on_work()

    def cancel(self, sequence: Sequence) -> None:
        """Give the lease of a cancelled sequence back, if its blocks are not pulled yet."""
        session = self._came_over.pop(sequence, None)
        if session is not None:
            self.carry_out(session, session.intake.cancel(sequence.lease_id))

    def link_lost(self, session: LinkSession) -> None:
        """Drop what was only reserved over a link; go on with what was adopted.

        A stream whose ADOPT the kernel did not accept whole is not ours: prefilld hands it to
        another decoded, or its client asks again.
        """
        self.carry_out(session, session.intake.link_lost())
        for sequence, owner in tuple(self._unconfirmed.items()):
            if owner is session:
                del self._unconfirmed[sequence]
                sequence.stream.abandon()
                self._book.client_gone(sequence)

    def take_early_results(self) -> list[tuple[Sequence, StepResult]]:
        """Return sequences that have started, each with what its early step brought, once."""
        results = [
            (early, sequence, early.result)
            for early, sequence in self._begun.items()
            if early.result is not None
        ]
        for early, _, _ in results:
            del self._begun[early]
        return [(sequence, result) for _, sequence, result in results]

    # --- single effects ------------------------------------------------------------------------

    def _answer(
        self, session: LinkSession, kind: type[wire.NoChunk | wire.Release], lease_id: int
    ) -> None:
        credits = self._links.credits(session)
        session.send(kind(epoch=session.epoch, lease=lease_id, credits=credits))

    def _adopt(self, session: LinkSession, lease_id: int, sequence: Sequence) -> None:
        self._book.add(sequence)
        self._came_over[sequence] = self._unconfirmed[sequence] = session
        credits = self._links.credits(session)
        session.send(
            wire.Adopt(epoch=session.epoch, lease=lease_id, credits=credits),
            on_sent=lambda: self._confirmed(sequence),
        )
        # Numbers and lines after words that somebody waits for.
        self._metrics.adopted.inc()
        self._service.log.info(
            "handoff.adopted",
            request_id=sequence.state.id,
            lease_id=lease_id,
            prompt_tokens=sequence.state.prompt_tokens,
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
                credits=self._links.credits(session),
            )
        )

    def _start(self, effect: Pulled[Sequence]) -> None:
        sequence = effect.request
        session = self._came_over.pop(sequence, None)
        sequence.settle(effect.blocks, effect.in_place)
        sequence.times.copy_start_ns = effect.copy_start_ns
        sequence.times.copy_done_ns = effect.copy_done_ns
        sequence.has_started = True
        self._scheduler.start(sequence)
        if effect.early is not None:
            sequence.go_on_from(effect.early)
            self._scheduler.launched([sequence])
            self._begun[effect.early] = sequence
        if effect.in_place and session is not None:
            self._in_place.add(session, effect)
        waited_ns = max(0, effect.copy_done_ns - sequence.times.adopted_ns)
        self._metrics.pull_seconds.observe(waited_ns / NS_PER_S)
        self._service.log.info(
            "lease.pulled",
            request_id=sequence.state.id,
            lease_id=sequence.lease_id,
            waited_us=waited_ns // 1000,
        )
