"""Serves adopted requests: pulls their blocks, decodes them in one batch, streams and ends them.

Everything here runs on the event loop; the engine thread only executes the turns that this decides.
What a turn reads or writes is never freed while it runs: a sequence that is cancelled meanwhile leaves
before the next turn, and a lease's blocks wait for its copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Series
from typing import TYPE_CHECKING

from decoded.answers import end_of
from decoded.decode import BUSY_COPY_BYTES, IDLE_COPY_BYTES, CopyJob, TurnResult, run_turn
from decoded.intake import (
    BlockCopy,
    Effect,
    Ignored,
    Intake,
    Lost,
    Pulled,
    SendAdopt,
    SendNoChunk,
    SendReject,
    SendRelease,
    Unreserve,
)
from decoded.scheduler import Scheduler
from decoded.sequence import Sequence
from decoded.stream import ClientStream
from protocol import messages as wire
from shared.clock import NS_PER_S
from shared.kv.pull import slice_blocks

if TYPE_CHECKING:
    from decoded.link import LinkSession
    from decoded.metrics import DecodeMetrics
    from shared.daemon.model_host import ModelHost
    from shared.engine.runner import ModelRunner
    from shared.engine.thread import EngineThread
    from shared.kv.allocator import BlockAllocator
    from shared.kv.pool import KVPool
    from shared.service.frame import Service


class Serving:
    """All sequences that are decoded's, and the links that they came over."""

    def __init__(
        self,
        *,
        service: Service,
        host: ModelHost,
        runner: ModelRunner,
        engine: EngineThread,
        pool: KVPool,
        allocator: BlockAllocator,
        metrics: DecodeMetrics,
    ) -> None:
        self._service, self._host, self._runner, self._engine = service, host, runner, engine
        self._pool, self._metrics = pool, metrics
        self._loop = asyncio.get_running_loop()
        self._scheduler: Scheduler[Sequence] = Scheduler(
            allocator=allocator, max_batch=service.config.decoded.max_batch
        )
        self._sessions: list[LinkSession] = []
        self._sequences: dict[Sequence, LinkSession] = {}
        """Adopted and not ended, with the link that each came over."""
        self._streams: set[ClientStream] = set()
        """Connections that are open, of ended sequences too."""
        self._work = asyncio.Event()

    # --- what others may know ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is adopted and every client has its last byte."""
        return not self._sequences and not self._streams

    @property
    def sessions(self) -> tuple[LinkSession, ...]:
        """Links that live, and lost ones whose blocks are still being read."""
        return tuple(self._sessions)

    def held_leases(self, epoch: bytes) -> list[int]:
        """Return the leases of an epoch whose blocks are still being read."""
        return [
            lease_id
            for session in self._sessions
            if session.epoch == epoch
            for lease_id in session.intake.held
        ]

    def sequences_status(self) -> dict[str, object]:
        """Return what STATUS tells of sequences."""
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_reserved,
            "swapped": 0,
        }

    def credits(self, session: LinkSession) -> wire.Credits:
        """Return what can still be taken, for a frame on that link."""
        room = self._scheduler.room
        return wire.Credits(
            free_blocks=room.free_blocks,
            free_sequences=room.free_sequences,
            queue_depth=sum(other.intake.num_unstarted for other in self._sessions),
            seen=session.intake.seen,
        )

    # --- links -------------------------------------------------------------------------------

    def new_intake(self) -> Intake[Sequence]:
        """Return the book of leases for a new link."""
        return Intake(reserve=self._scheduler.reserve)

    def add_session(self, session: LinkSession) -> None:
        """Serve what comes over a link."""
        self._sessions.append(session)

    def on_chunk(self, session: LinkSession, message: wire.Chunk) -> None:
        """Pull blocks of a prompt that is still being computed."""
        effects = session.intake.chunk(
            lease_id=message.lease,
            slot=message.slot,
            generation=message.generation,
            first=message.first,
            blocks=message.blocks,
            total=message.total_blocks,
        )
        self._carry_out(session, effects)

    def on_handoff(
        self, session: LinkSession, message: wire.Handoff, descriptor: int | None
    ) -> None:
        """Adopt a request, or say why not."""
        now_ns = self._now_ns()
        sequence: Sequence
        stream = ClientStream(
            descriptor,
            residue=message.residue,
            is_streaming=message.request.stream,
            loop=self._loop,
            on_cancel=lambda: self._cancel(sequence),
            on_closed=lambda: self._client_gone(sequence),
            now_s=now_ns / NS_PER_S,
        )
        sequence, piece = Sequence.adopt(
            message,
            stream=stream,
            token_bytes=self._host.tokenizer.token_bytes,
            adopted_ns=now_ns,
        )
        stream.push(piece)
        if descriptor is None:
            effects = session.intake.handoff_without_descriptor(message.lease, sequence)
        else:
            effects = session.intake.handoff(
                lease_id=message.lease,
                slot=message.slot,
                generation=message.generation,
                blocks=message.blocks,
                total=message.total_blocks,
                request=sequence,
            )
        self._carry_out(session, effects)

    def on_abort(self, session: LinkSession, message: wire.Abort) -> None:
        """Give a lease back that prefilld wants back."""
        self._carry_out(session, session.intake.abort(message.lease))

    def on_lost(self, session: LinkSession) -> None:
        """Drop what was only reserved; go on with what was adopted.

        A stream whose ADOPT was not accepted whole by the kernel is not ours: prefilld hands it
        to another decoded, or its client asks again.
        """
        self._carry_out(session, session.intake.link_lost())
        for sequence, owner in list(self._sequences.items()):
            if owner is session and not sequence.stream.is_active:
                sequence.stream.abandon()
                self._client_gone(sequence)
        self._work.set()

    # --- effects of the lease book -----------------------------------------------------------

    def _carry_out(self, session: LinkSession, effects: Series[Effect[Sequence]]) -> None:
        """Do what a lease book decided, in its order."""
        for effect in effects:
            match effect:
                case SendNoChunk(lease_id=lease_id):
                    session.send(
                        wire.NoChunk(
                            epoch=session.epoch, lease=lease_id, credits=self.credits(session)
                        )
                    )
                case SendAdopt(lease_id=lease_id, request=sequence):
                    self._adopt(session, lease_id, sequence)
                case SendReject():
                    self._reject(session, effect)
                case SendRelease(lease_id=lease_id):
                    session.send(
                        wire.Release(
                            epoch=session.epoch, lease=lease_id, credits=self.credits(session)
                        )
                    )
                case Unreserve(blocks=blocks):
                    self._scheduler.unreserve(blocks)
                case Pulled():
                    self._start(effect)
                case Lost(request=sequence):
                    self._metrics.voided.inc()
                    self._fail(sequence, "prefill-lost", "the prompt's blocks were revoked")
                case Ignored(kind=kind, lease_id=lease_id):
                    self._metrics.ignored.labels(kind).inc()
                    self._service.log.debug("lease.ignored", what=kind, lease_id=lease_id)
        self._work.set()

    def _adopt(self, session: LinkSession, lease_id: int, sequence: Sequence) -> None:
        self._sequences[sequence] = session
        self._streams.add(sequence.stream)
        self._metrics.adopted.inc()
        self._service.log.info(
            "handoff.adopted",
            request_id=sequence.state.id,
            lease_id=lease_id,
            prompt_tokens=sequence.state.prompt_tokens,
        )
        session.send(
            wire.Adopt(epoch=session.epoch, lease=lease_id, credits=self.credits(session)),
            on_sent=sequence.stream.activate,
        )

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
        sequence.blocks = effect.blocks
        sequence.times.copy_start_ns = effect.copy_start_ns
        sequence.times.copy_done_ns = effect.copy_done_ns
        self._scheduler.start(sequence)
        waited_ns = max(0, effect.copy_done_ns - sequence.times.adopted_ns)
        self._metrics.pull_seconds.observe(waited_ns / NS_PER_S)
        self._service.log.info(
            "lease.pulled",
            request_id=sequence.state.id,
            lease_id=sequence.lease_id,
            waited_us=waited_ns // 1000,
        )

    # --- turns -------------------------------------------------------------------------------

    async def decode_loop(self) -> None:
        """Take one turn after the other, for ever."""
        while True:
            self._end_cancelled()
            batch = self._scheduler.next_batch()
            copies = self._next_copies(is_busy=bool(batch))
            if not batch and not copies:
                self._tell_credits()
                self._work.clear()
                await self._work.wait()
                continue
            jobs = [CopyJob(source=session.kv, copy=copy) for session, copy in copies]
            steps = [sequence.next_step() for sequence in batch]
            result = await self._engine.run(run_turn, self._runner, self._pool.kv, jobs, steps)
            del jobs  # a mapping is closed only once no tensor of it is left
            self._copied(copies, result)
            self._stepped(batch, result)
            self._tell_credits()

    def wake(self) -> None:
        """Look again at what there is to do."""
        self._work.set()

    def _next_copies(self, *, is_busy: bool) -> list[tuple[LinkSession, BlockCopy]]:
        """Choose the next turn's copies; what was revoked already is not copied at all."""
        budget = BUSY_COPY_BYTES if is_busy else IDLE_COPY_BYTES
        left = slice_blocks(self._host.layout, budget)
        chosen: list[tuple[LinkSession, BlockCopy]] = []
        for session in self._sessions:
            for copy in session.intake.next_copies(left):
                if session.is_valid(copy):
                    left -= len(copy.sources)
                    chosen.append((session, copy))
                else:
                    self._carry_out(session, session.intake.copied(copy, is_valid=False))
        return chosen

    def _copied(self, copies: list[tuple[LinkSession, BlockCopy]], result: TurnResult) -> None:
        """Believe the copies whose leases still stand, now that they are complete."""
        block_bytes = self._host.layout.block_bytes
        for session, copy in copies:
            self._metrics.pulled_bytes.inc(len(copy.sources) * block_bytes)
            effects = session.intake.copied(
                copy,
                is_valid=session.is_valid(copy),
                start_ns=result.copy_start_ns,
                done_ns=result.copy_done_ns,
            )
            self._carry_out(session, effects)

    def _stepped(self, batch: list[Sequence], result: TurnResult) -> None:
        """Send each sequence its token, and end those that are done."""
        if not batch:
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe((result.step_done_ns - result.copy_done_ns) / NS_PER_S)
        for sequence, token_id in zip(batch, result.token_ids, strict=True):
            assert token_id is not None, "every decode step samples"
            if not sequence.new_ids:
                sequence.times.first_step_ns = result.step_done_ns
                waited_ns = result.step_done_ns - sequence.state.first_token_ns
                self._metrics.second_token_seconds.observe(waited_ns / NS_PER_S)
            piece = sequence.push(token_id)
            self._metrics.generated_tokens.inc()
            sequence.stream.push(piece)
            if piece.finish is not None:
                self._end(sequence, piece.finish)

    def _tell_credits(self) -> None:
        for session in self._sessions:
            session.tell_credits()

    # --- ends --------------------------------------------------------------------------------

    def _cancel(self, sequence: Sequence) -> None:
        sequence.is_cancelled = True
        self._work.set()

    def _client_gone(self, sequence: Sequence) -> None:
        self._streams.discard(sequence.stream)
        self._cancel(sequence)

    def _end_cancelled(self) -> None:
        """Take cancelled sequences out, between two turns."""
        for sequence in [one for one in self._sequences if one.is_cancelled]:
            if not sequence.blocks:  # its lease is still being pulled
                session = self._sequences[sequence]
                self._carry_out(session, session.intake.cancel(sequence.lease_id))
            self._end(sequence, "cancelled")

    def _end(self, sequence: Sequence, reason: str) -> None:
        """Send END and free the blocks; only between turns."""
        is_gone = sequence.stream.is_closed
        self._metrics.ended.labels("gone" if is_gone else reason).inc()
        self._service.log.info(
            "request.ended",
            request_id=sequence.state.id,
            reason="gone" if is_gone else reason,
            completion_tokens=sequence.completion_tokens,
        )
        self._forget(sequence)
        sequence.stream.finish(end_of(sequence, reason, self._now_ns()))

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        """Send ERROR to a sequence's client; the client may ask again."""
        self._metrics.failed.labels(code).inc()
        self._service.log.warning(
            "request.failed", request_id=sequence.state.id, code=code, reason=message
        )
        self._forget(sequence)
        sequence.stream.finish(wire.Error(code=code, message=message, retryable=True))

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence]
        if sequence.blocks:
            self._scheduler.finish(sequence)

    def expire(self, now_s: float) -> None:
        """Cancel clients that take nothing, and close mappings that nobody needs any more."""
        stall_s = self._service.config.limits.client_stall_timeout_s
        for stream in list(self._streams):
            if stream.is_stalled(now_s, stall_s):
                self._service.log.warning("client.stalled", timeout_s=stall_s)
                stream.close()
        for session in list(self._sessions):
            session.tick()
            if session.close_mapping():
                self._sessions.remove(session)

    def end_all(self, code: str, message: str) -> None:
        """Tell every client that is left that the daemon stops; nothing may start after this."""
        for sequence in list(self._sequences):
            self._fail(sequence, code, message)
        for session in list(self._sessions):
            session.leave()

    def _now_ns(self) -> int:
        return self._service.clock.monotonic_ns()
