"""decoded's loop: one turn after the other, each of some copies and one step for the whole batch.

The event loop's thread decides and the engine thread executes, so all state has one owner and needs
no lock.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from decoded.decode import BUSY_COPY_BYTES, IDLE_COPY_BYTES, CopyJob, TurnResult, run_turn
from shared.clock import NS_PER_S
from shared.kv.pull import slice_blocks

if TYPE_CHECKING:
    from decoded.adoption import AdoptionDesk
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook
    from shared.engine.runner import ModelRunner
    from shared.engine.thread import EngineThread
    from shared.kv.pool import KVPool


class DecodeLoop:
    """Takes turns for as long as there is something to do, and waits otherwise.

    Args:
        runner: The model over `pool`.
        engine: The thread that computes.
        pool: decoded's own pool.
        work: Set whenever there may be something to do.
        scheduler: The batch.
        desk: What is to be copied.
        book: The sequences.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        engine: EngineThread,
        pool: KVPool,
        work: asyncio.Event,
        scheduler: Scheduler[Sequence],
        desk: AdoptionDesk,
        book: SequenceBook,
        metrics: DecodeMetrics,
    ) -> None:
        self._runner, self._engine, self._pool, self._work = runner, engine, pool, work
        self._scheduler, self._desk, self._book = scheduler, desk, book
        self._metrics = metrics

    async def run(self) -> None:
        """Take turns, for ever."""
        while True:
            self._end_cancelled()
            batch = self._scheduler.next_batch()
            budget = BUSY_COPY_BYTES if batch else IDLE_COPY_BYTES
            copies = self._desk.next_copies(slice_blocks(self._pool.layout, budget))
            if not batch and not copies:
                self._desk.tell_credits()
                self._work.clear()
                await self._work.wait()
                continue
            jobs = [CopyJob(source=session.peer_pool.kv, copy=copy) for session, copy in copies]
            steps = [sequence.next_step() for sequence in batch]
            result = await self._engine.run(run_turn, self._runner, self._pool.kv, jobs, steps)
            del jobs  # a mapping can be closed only once no tensor of it is left
            for session, copy in copies:
                self._metrics.pulled_bytes.inc(len(copy.sources) * self._pool.layout.block_bytes)
                self._desk.copied(
                    session, copy, start_ns=result.copy_start_ns, done_ns=result.copy_done_ns
                )
            if batch:
                self._stepped(batch, result)
            self._desk.tell_credits()

    def _stepped(self, batch: list[Sequence], result: TurnResult) -> None:
        """Send each sequence its token, and end those that are done."""
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe((result.step_done_ns - result.copy_done_ns) / NS_PER_S)
        for sequence, token_id, logprob in zip(
            batch, result.token_ids, result.logprobs, strict=True
        ):
            assert token_id is not None, "every decode step samples"
            if not sequence.new_ids:
                sequence.times.first_step_ns = result.step_done_ns
                waited_ns = result.step_done_ns - sequence.state.first_token_ns
                self._metrics.second_token_seconds.observe(waited_ns / NS_PER_S)
            piece = sequence.push(token_id, logprob)
            self._metrics.generated_tokens.inc()
            sequence.stream.push(piece, sequence.take_logprobs(piece))
            if piece.finish is not None:
                self._book.end(sequence, piece.finish)

    def _end_cancelled(self) -> None:
        """Take cancelled sequences out; no turn is running now."""
        for sequence in self._book.living:
            if sequence.is_cancelled:
                self._desk.cancel_pull(sequence)
                self._book.end(sequence, "cancelled")
