"""decoded's loop: one turn after the other, each of some copies and one step for the whole batch.

A step is for a whole batch, or for one lease that begins early (`early_step.py`): that the engine
launches by itself, behind a copy, and the loop learns of it with the copy's end.

The event loop's thread decides and the engine thread executes, so all state has one owner and needs
no lock.  Where the engine allows it, a step is launched before the one before it was looked at: the
GPU then never waits for this loop.  What such a step computes for a sequence that had ended by then
is dropped, and the sequence's blocks are free only once that step is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from decoded.turns import CopyJob, SwapJob
from shared.kv.pull import slice_blocks

if TYPE_CHECKING:
    from decoded.adoption import AdoptionDesk
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook
    from decoded.step_result import StepResult
    from decoded.swap_desk import SwapDesk
    from decoded.turns import TurnResult, Turns
    from shared.engine.thread import EngineThread
    from shared.kv.layout import KVLayout

BUSY_COPY_BYTES = 32 << 20
"""Bytes to copy in a turn beside a step, where a turn does one after the other.

At the 4 to 8 GB/s of one core they take 4 to 8 ms: a fifth at most of an embedded model's step.
"""

IDLE_COPY_BYTES = 256 << 20
"""Bytes to copy in such a turn without a step: bounds how long a cancel waits."""


class DecodeLoop:
    """Takes turns for as long as there is something to do, and waits otherwise.

    Args:
        turns: What takes them.
        engine: The thread that computes.
        layout: Of decoded's own pool.
        scheduler: The batch.
        desk: What is to be copied.
        swaps: Who has to make room, and comes back.
        book: The sequences.
    """

    def __init__(
        self,
        *,
        turns: Turns,
        engine: EngineThread,
        layout: KVLayout,
        scheduler: Scheduler[Sequence],
        desk: AdoptionDesk,
        swaps: SwapDesk,
        book: SequenceBook,
        metrics: DecodeMetrics,
    ) -> None:
        self._turns, self._engine, self._layout = turns, engine, layout
        self._scheduler, self._desk, self._book = scheduler, desk, book
        self._swaps, self._metrics = swaps, metrics
        self._last_step_ns = 0
        """When the previous step ended."""
        self._work = asyncio.Event()
        self._in_flight: deque[list[Sequence] | CopyJob] = deque()
        """What each step is for that is launched and not collected, the oldest first: a batch, or
        the lease whose last copy brought an early one."""
        self._num_copies = 0
        """Copies that were submitted and not reported."""
        self._is_submitting = False

    def wake(self) -> None:
        """Look again: there may be something to copy, to decode, or to end."""
        self._work.set()
        self._turns.interrupt()
        if self._turns.copies_beside_steps and not self._is_submitting:
            # Not at once: whoever calls may be in the middle of the books.
            self._is_submitting = True
            asyncio.get_running_loop().call_soon(self._submit_copies, 0)

    async def run(self) -> None:
        """Take turns, for ever."""
        while True:
            self._work.clear()
            self._take_early_results()
            self._end_cancelled()
            has_room = len(self._in_flight) < self._turns.depth
            batch = self._swaps.next_batch() if has_room else []
            self._submit_copies(BUSY_COPY_BYTES if batch else IDLE_COPY_BYTES)
            if not batch and not self._in_flight and not self._num_copies:
                self._desk.links.tell_credits()
                await self._work.wait()
                continue
            steps = [sequence.next_step() for sequence in batch]
            if batch:
                self._scheduler.launched(batch)
                self._in_flight.append(batch)
            result = await self._engine.run(self._turns.take, steps)
            self._take_copies(result)
            if result.step is not None:
                self._collected(self._in_flight.popleft(), result.step)
            self._desk.links.tell_credits()

    def _submit_copies(self, max_bytes: int) -> None:
        """Hand the engine what may be copied; `max_bytes` bounds it where steps wait for it."""
        self._is_submitting = False
        max_blocks = self._layout.num_blocks
        if not self._turns.copies_beside_steps:
            max_blocks = slice_blocks(self._layout, max_bytes)
        # Swaps first: what they make free, others wait for.
        jobs: list[CopyJob | SwapJob] = []
        for swap in self._swaps.next_swaps(max_blocks):
            max_blocks -= len(swap.sources)
            jobs.append(SwapJob(swap=swap))
        for session, copy in self._desk.next_copies(max_blocks):
            jobs.append(CopyJob(session=session, copy=copy))
        self._num_copies += len(jobs)
        for job in jobs:
            self._turns.submit(job)

    def _take_copies(self, result: TurnResult) -> None:
        self._num_copies -= len(result.copies)
        for done in result.copies:
            match done.job:
                case SwapJob(swap=swap):
                    self._swaps.swapped(
                        swap, duration_ns=done.duration_ns, device_ns=done.device_ns
                    )
                case CopyJob(session=session, copy=copy):
                    if done.is_complete:
                        num_bytes = len(copy.sources) * self._layout.block_bytes
                        self._metrics.copied(
                            num_bytes=num_bytes,
                            duration_ns=done.duration_ns,
                            device_ns=done.device_ns,
                        )
                    if done.has_begun_step:
                        self._in_flight.append(done.job)
                    self._desk.copied(session, copy, done)

    def _collected(self, of: list[Sequence] | CopyJob, result: StepResult) -> None:
        """Take a step's result for whatever it was launched for."""
        if isinstance(of, CopyJob):
            self._desk.early_done(of.session, of.copy, result)
            self._take_early_results()
        else:
            self._stepped(of, result)

    def _take_early_results(self) -> None:
        """Go on with sequences that have started, and whose early steps are over."""
        for sequence, result in self._desk.leases.take_early_results():
            self._stepped([sequence], result)

    def _stepped(self, batch: list[Sequence], result: StepResult) -> None:
        """Send each sequence its token, and end those that are done."""
        voided = [
            sequence
            for sequence in batch
            if self._book.is_living(sequence) and not self._desk.in_place.is_valid(sequence)
        ]
        self._scheduler.collected(batch)
        self._desk.in_place.stepped(batch)
        for sequence in voided:
            self._metrics.voided.inc()
            self._book.fail(sequence, "prefill-lost", "the prompt's blocks were revoked")
        living = [sequence for sequence in batch if self._book.is_living(sequence)]
        second = [sequence for sequence in living if not sequence.new_ids]
        for sequence in second:
            sequence.times.first_step_ns = result.done_ns
            sequence.times.first_step_device_ns = result.device_ns
        # Tokens before numbers: a client waits for the former.
        for sequence, token_id in zip(batch, result.token_ids, strict=True):
            if not self._book.is_living(sequence):
                continue  # it ended while this step was running
            piece = sequence.push(token_id)
            sequence.stream.push(piece, sequence.take_logprobs(piece))
            if piece.finish is not None:
                self._book.end(sequence, piece.finish)
        for sequence in second:
            self._metrics.second_token(sequence)
            self._book.tell_stages(sequence)
        self._metrics.stepped(
            num_sequences=len(living),
            num_second=len(second),
            step_s=result.seconds,
            device_ns=result.device_ns,
            since_ns=max(0, result.done_ns - self._last_step_ns),
        )
        self._last_step_ns = max(self._last_step_ns, result.done_ns)

    def _end_cancelled(self) -> None:
        """Take cancelled sequences out."""
        for sequence in self._book.living:
            if sequence.is_cancelled:
                self._desk.leases.cancel(sequence)
                self._book.end(sequence, "cancelled")
