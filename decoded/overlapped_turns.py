"""Turns on a GPU: copies and steps run beside each other, and both beside the host.

A turn launches a step behind the one that is running and waits for that one, so between two steps
the GPU finds the next one already there.  While it waits, it also looks after copies: each waits
until prefilld's GPU has written what is to be copied, runs on a stream of its own, and is reported
when the host has seen its end; whatever is launched afterwards is ordered behind it.

A prompt's last copy may bring its sequence's first step along (`early_step.py`).  Where no step is
in flight, that is made ready beside the copy and launched as soon as the copy is over and the first
token is told, without a word to the event loop; the copy is reported with it.

Whether blocks are written is asked, and asked again, and never waited for on the GPU: a stream that
waits for an event of a process that was killed waits for ever, and with it the whole device.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoded.turns import CopyDone, CopyJob, TurnResult
from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.block_puller import BlockPuller, PreparedCopy
    from shared.engine.decoding import DecodeStep, PreparedStep, PreparingDecoder

POLL_S = 20e-6
"""Pause between two looks: short against a step; the interpreter is free meanwhile."""

REHEARSAL_NS = 100_000
"""Between two rehearsals.  After 20 ms without work a first step takes 0.7 ms more than a later one
(half of it is the host's), after 50 us 0.3 ms (one H200)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    job: CopyJob
    deadline_ns: int
    """Until when the blocks must be written."""
    prepared: PreparedCopy
    start_ns: int = 0
    """When it was launched; 0 before."""
    done_ns: int = 0
    """When it was seen complete; 0 before."""
    first_step: PreparedStep | None = None
    """To be launched behind it."""


class OverlappedTurns:
    """See `decoded.turns.Turns`.

    Args:
        decoder: What computes steps.
        puller: What copies blocks.
        event_timeout_s: How long blocks may be announced and not written.
    """

    copies_beside_steps = True

    def __init__(
        self, decoder: PreparingDecoder, puller: BlockPuller, *, event_timeout_s: float
    ) -> None:
        self._decoder, self._puller = decoder, puller
        self._event_timeout_ns = int(event_timeout_s * NS_PER_S)
        self._submitted: deque[CopyJob] = deque()
        """Handed over from the event loop's thread."""
        self._copies: list[_Copy] = []
        self._is_interrupted = False
        self._launched_ns: deque[int] = deque()
        self._last_done_ns = 0
        self._rehearsed_ns = 0

    @property
    def depth(self) -> int:
        """See `Turns.depth`."""
        return self._decoder.depth

    def submit(self, job: CopyJob) -> None:
        """See `Turns.submit`."""
        self._submitted.append(job)

    def set_peer(self, kv: Tensor | None) -> None:
        """See `Turns.set_peer`."""
        self._decoder.set_peer(kv)

    def interrupt(self) -> None:
        """See `Turns.interrupt`."""
        self._is_interrupted = True

    def take(self, steps: Sequence[DecodeStep]) -> TurnResult:
        """See `Turns.take`."""
        decoder = self._decoder
        if steps:
            decoder.launch(steps)
            self._launched_ns.append(time.monotonic_ns())
        is_full = decoder.num_in_flight >= decoder.depth
        copies: list[CopyDone] = []
        while True:
            copies += self._look_after_copies()
            if decoder.num_in_flight and decoder.is_done():
                return self._step_done(copies)
            # With room for another step, whatever may add to it is reported at once.
            if not is_full and (steps or copies or self._is_interrupted):
                break
            if not decoder.num_in_flight and not self._copies and not self._submitted:
                break
            time.sleep(POLL_S)
        self._is_interrupted = False
        return TurnResult(copies=copies, token_ids=None, step_done_ns=time.monotonic_ns())

    def _step_done(self, copies: list[CopyDone]) -> TurnResult:
        token_ids = self._decoder.collect()
        done_ns = time.monotonic_ns()
        # It began when it was launched, or when the step before it ended.
        began_ns = max(self._launched_ns.popleft(), self._last_done_ns)
        self._last_done_ns = done_ns
        self._is_interrupted = False
        return TurnResult(
            copies=copies,
            token_ids=token_ids,
            step_done_ns=done_ns,
            step_seconds=(done_ns - began_ns) / NS_PER_S,
        )

    def _look_after_copies(self) -> list[CopyDone]:
        """Launch copies whose blocks are written; return those that are over."""
        if not self._copies and not self._submitted:
            return []
        now_ns = time.monotonic_ns()
        while self._submitted:
            self._copies.append(self._prepared(self._submitted.popleft(), now_ns))
        over: list[CopyDone] = []
        left: list[_Copy] = []
        for copy in self._copies:
            done = self._look_after(copy, now_ns)
            if done is None:
                left.append(copy)
            else:
                over.append(done)
        self._copies = left
        return over

    def _prepared(self, job: CopyJob, now_ns: int) -> _Copy:
        """Make a copy ready, and the step behind it, if no other is launched or made ready."""
        blocks = job.copy
        is_alone = not self._decoder.num_in_flight and not any(
            copy.first_step for copy in self._copies
        )
        return _Copy(
            job=job,
            deadline_ns=now_ns + self._event_timeout_ns,
            prepared=self._puller.prepare(job.session.peer_pool.kv, blocks.sources, blocks.targets),
            first_step=self._decoder.prepare(blocks.early.step())
            if blocks.early is not None and is_alone
            else None,
        )

    def _look_after(self, copy: _Copy, now_ns: int) -> CopyDone | None:
        """Bring a copy forward; return what became of it once it is over."""
        if not copy.start_ns:
            self._try_start(copy, now_ns)
        if not copy.start_ns:
            if self._is_hopeless(copy, now_ns):
                return CopyDone(job=copy.job, is_complete=False, start_ns=now_ns, done_ns=now_ns)
            self._keep_warm(copy, now_ns)
            return None
        if not copy.done_ns and copy.prepared.is_done():
            copy.done_ns = time.monotonic_ns()
        if not copy.done_ns:
            return None
        has_begun_step = False
        if copy.first_step is not None:
            token_id = copy.job.session.peer_pool.first_token(copy.job.copy)
            if token_id is None and not self._is_waited_for(copy, now_ns):
                return None
            has_begun_step = token_id is not None and self._try_step(copy, token_id)
        return CopyDone(
            job=copy.job,
            is_complete=True,
            start_ns=copy.start_ns,
            done_ns=copy.done_ns,
            has_begun_step=has_begun_step,
        )

    def _is_waited_for(self, copy: _Copy, now_ns: int) -> bool:
        """Whether a copy is to be reported although its first token is not told."""
        has_other_work = self._decoder.num_in_flight > 0 or self._is_interrupted
        return has_other_work or self._is_hopeless(copy, now_ns)

    def _try_step(self, copy: _Copy, token_id: int) -> bool:
        """Launch the step behind a copy; False where it cannot be, or must not."""
        job = copy.job
        assert copy.first_step is not None
        assert job.copy.early is not None
        if not job.session.peer_pool.is_valid(job.copy) or not copy.first_step.launch(token_id):
            return False
        job.copy.early.token_id = token_id
        self._launched_ns.append(time.monotonic_ns())
        return True

    def _keep_warm(self, copy: _Copy, now_ns: int) -> None:
        """Rehearse, now and then, what is to be launched soon."""
        is_due = now_ns - self._rehearsed_ns >= REHEARSAL_NS
        # Not where it would take the GPU from the very prompt that is waited for.
        is_free = not copy.job.session.peer_pool.is_on_same_device
        if copy.first_step is not None and is_due and is_free and not self._decoder.num_in_flight:
            self._rehearsed_ns = now_ns
            copy.first_step.rehearse()

    def _try_start(self, copy: _Copy, now_ns: int) -> None:
        blocks, pool = copy.job.copy, copy.job.session.peer_pool
        if not (pool.is_valid(blocks) and pool.is_written(blocks.event)):
            return
        copy.start_ns = now_ns
        copy.prepared.start(is_busy=self._decoder.num_in_flight > 0)

    def _is_hopeless(self, copy: _Copy, now_ns: int) -> bool:
        """Whether a copy will never start: its writer is gone or stuck, or took the blocks back."""
        session = copy.job.session
        is_revoked = not session.peer_pool.is_valid(copy.job.copy)
        return is_revoked or session.is_lost or now_ns >= copy.deadline_ns
