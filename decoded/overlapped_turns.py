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

from decoded.early_launch import EarlyLaunch
from decoded.step_result import StepResult
from decoded.turns import CopyDone, CopyJob, SwapJob, TurnResult, ends_of
from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.block_puller import BlockPuller, PreparedCopy
    from shared.engine.decoding import DecodeStep, PreparingDecoder

POLL_S = 20e-6
"""Pause between two looks: short against a step; the interpreter is free meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArenaPath:
    """How blocks get to the arena and back."""

    pool: Tensor
    """The own pool's memory."""
    arena: Tensor
    """The arena's, of the same shape but for the number of blocks."""
    out: BlockPuller
    """Copies into the arena, out of the own pool or the peer's."""
    back: BlockPuller
    """Copies into the own pool."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    job: CopyJob | SwapJob
    deadline_ns: int
    """Until when the blocks must be written."""
    prepared: PreparedCopy
    start_ns: int = 0
    """When it was launched; 0 before."""
    done_ns: int = 0
    """When it was seen complete; 0 before."""
    early: EarlyLaunch | None = None
    """What is to be launched behind it."""


class OverlappedTurns:
    """See `decoded.turns.Turns`.

    Args:
        decoder: What computes steps.
        puller: What copies blocks.
        event_timeout_s: How long blocks may be announced and not written.
        arena_path: The way to the arena; None where there is none: then nothing is copied to it.
    """

    copies_beside_steps = True

    def __init__(
        self,
        decoder: PreparingDecoder,
        puller: BlockPuller,
        *,
        event_timeout_s: float,
        arena_path: ArenaPath | None = None,
    ) -> None:
        self._decoder, self._puller, self._arena_path = decoder, puller, arena_path
        self._event_timeout_ns = int(event_timeout_s * NS_PER_S)
        self._submitted: deque[CopyJob | SwapJob] = deque()
        """Handed over from the event loop's thread."""
        self._copies: list[_Copy] = []
        self._is_interrupted = False
        self._launched_ns: deque[int] = deque()
        self._last_done_ns = 0

    @property
    def depth(self) -> int:
        """See `Turns.depth`."""
        return self._decoder.depth

    def submit(self, job: CopyJob | SwapJob) -> None:
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
        return TurnResult(copies=copies, step=None)

    def _step_done(self, copies: list[CopyDone]) -> TurnResult:
        collected = self._decoder.collect()
        done_ns = time.monotonic_ns()
        # It began when it was launched, or when the step before it ended.
        began_ns = max(self._launched_ns.popleft(), self._last_done_ns)
        self._last_done_ns = done_ns
        self._is_interrupted = False
        step = StepResult(
            token_ids=collected.token_ids,
            done_ns=done_ns,
            seconds=(done_ns - began_ns) / NS_PER_S,
            device_ns=collected.device_ns,
        )
        return TurnResult(copies=copies, step=step)

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

    def _prepared(self, job: CopyJob | SwapJob, now_ns: int) -> _Copy:
        """Make a copy ready, and the step behind it, if no other is launched or made ready."""
        copy = _Copy(
            job=job, deadline_ns=now_ns + self._event_timeout_ns, prepared=self._prepare(job)
        )
        is_alone = not self._decoder.num_in_flight and not any(
            other.early for other in self._copies
        )
        if isinstance(job, CopyJob) and job.copy.early is not None and is_alone:
            copy.early = EarlyLaunch(job.copy.early, job, self._decoder)
        return copy

    def _prepare(self, job: CopyJob | SwapJob) -> PreparedCopy:
        path = self._arena_path
        if isinstance(job, CopyJob) and not job.copy.is_to_arena:
            blocks = job.copy
            return self._puller.prepare(job.session.peer_pool.kv, blocks.sources, blocks.targets)
        assert path is not None, "places in the arena are taken where there is one"
        is_back = isinstance(job, SwapJob) and not job.swap.is_out
        source, _, sources, targets = ends_of(job, path.pool, path.arena)
        return (path.back if is_back else path.out).prepare(source, sources, targets)

    def _look_after(self, copy: _Copy, now_ns: int) -> CopyDone | None:
        """Bring a copy forward; return what became of it once it is over."""
        if not copy.start_ns:
            self._try_start(copy, now_ns)
        if not copy.start_ns:
            if _is_hopeless(copy, now_ns):
                return CopyDone(job=copy.job, is_complete=False, start_ns=now_ns, done_ns=now_ns)
            if copy.early is not None:
                copy.early.keep_warm(now_ns)
            return None
        if not copy.done_ns and copy.prepared.is_done():
            copy.done_ns = time.monotonic_ns()
        if not copy.done_ns or self._waits_for_token(copy, now_ns):
            return None
        has_begun_step = copy.early is not None and copy.early.try_launch()
        if has_begun_step:
            self._launched_ns.append(time.monotonic_ns())
        return CopyDone(
            job=copy.job,
            is_complete=True,
            start_ns=copy.start_ns,
            done_ns=copy.done_ns,
            has_begun_step=has_begun_step,
            device_ns=copy.prepared.device_ns(),  # behind the launch: no step waits for a number
        )

    def _waits_for_token(self, copy: _Copy, now_ns: int) -> bool:
        """Whether a complete copy is not reported yet, for the step behind it may still begin."""
        if copy.early is None or copy.early.token_id is not None:
            return False
        has_other_work = self._decoder.num_in_flight > 0 or self._is_interrupted
        return not has_other_work and not _is_hopeless(copy, now_ns)

    def _try_start(self, copy: _Copy, now_ns: int) -> None:
        if copy.job.may_start:
            copy.start_ns = now_ns
            copy.prepared.start(is_busy=self._decoder.num_in_flight > 0)


def _is_hopeless(copy: _Copy, now_ns: int) -> bool:
    """Whether what a copy waits for will not come: its writer is gone, stuck, or took it back."""
    return copy.job.is_void or now_ns >= copy.deadline_ns
