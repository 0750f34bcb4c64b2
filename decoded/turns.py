"""One turn of decoded's engine: copies on their way, and a step for the whole batch.

A turn is what the engine thread does between two looks at the event loop.  There are two kinds:

*   On the CPU (`EagerTurns`) everything happens inside the turn, one thing after the other.
*   On a GPU (`overlapped_turns.py`) copies and steps run beside each other and beside the host: a
    turn launches a step and comes back with the result of the one before.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from decoded.step_result import StepResult
from shared.clock import NS_PER_S
from shared.kv.pull import copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from decoded.lease_effects import BlockCopy
    from decoded.link import LinkSession
    from decoded.sequence import Sequence as Adopted
    from decoded.swap_book import BlockSwap
    from shared.engine.decoding import Decoder, DecodeStep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyJob:
    """Blocks of one lease to pull."""

    session: LinkSession
    """The link whose pool they are in."""
    copy: BlockCopy

    @property
    def may_start(self) -> bool:
        """Whether the blocks are written, and the lease stands."""
        pool = self.session.peer_pool
        return pool.is_valid(self.copy) and pool.is_written(self.copy.event)

    @property
    def is_void(self) -> bool:
        """Whether it must not start any more, since its writer is gone or took the blocks back."""
        return self.session.is_lost or not self.session.peer_pool.is_valid(self.copy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapJob:
    """Blocks of one sequence to copy to the arena or back; they are written, and stay ours."""

    swap: BlockSwap[Adopted]

    @property
    def may_start(self) -> bool:
        """See `CopyJob.may_start`."""
        return True

    @property
    def is_void(self) -> bool:
        """See `CopyJob.is_void`."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyDone:
    """A copy that is not running any more; times are CLOCK_MONOTONIC in ns."""

    job: CopyJob | SwapJob
    is_complete: bool
    """False where it never ran: what it waited for will not come."""
    start_ns: int
    done_ns: int
    has_begun_step: bool = False
    """The step that came with it, `job.copy.early`, is launched and in flight, alone."""
    device_ns: int | None = None
    """How long it took the GPU, by its clock; None on a CPU."""

    @property
    def duration_ns(self) -> int:
        """How long it ran."""
        return self.done_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a turn found done."""

    copies: list[CopyDone]
    step: StepResult | None
    """What the oldest step in flight brought; None where no step is done."""


class Turns(Protocol):
    """Takes turns.  `take` and `set_peer` are called on the engine thread, the rest on the loop's.

    Steps are reported in the order in which they were launched.  One may be launched that nobody
    called `take` for: a copy's early step (`early_step.py`).  That copy's end tells of it
    (`CopyDone.has_begun_step`), no later than what the step brought.
    """

    @property
    def depth(self) -> int:
        """Most steps that may be launched and not reported."""

    @property
    def copies_beside_steps(self) -> bool:
        """Whether `submit` may be called during a turn, whatever the size of the copy."""

    def submit(self, job: CopyJob | SwapJob) -> None:
        """Have blocks copied; `take` reports it."""

    def set_peer(self, kv: Tensor | None) -> None:
        """Read blocks of a peer's pool in place, or of none any more.

        With None, no step that reads one is in flight.
        """

    def interrupt(self) -> None:
        """Let a turn that waits for copies alone come back: there is something to launch."""

    def take(self, steps: Sequence[DecodeStep]) -> TurnResult:
        """Launch a step unless `steps` is empty, and return what is done by now.

        Waits for the oldest step in flight where `steps` is empty or `depth` are in flight, and
        with none in flight for a copy.  With room for another step it comes back earlier for the
        end of a copy, or where it is interrupted.
        """


class EagerTurns:
    """Turns in which copies come first and the step second, all of it before `take` returns.

    The copies come first since the sequence that waits for them can then join the next step; the
    caller bounds them, so that a long prompt that arrives delays running streams by a known part
    of a step.

    Args:
        decoder: What computes steps.
        target: The own pool's tensor.
        arena: The arena's, of the same shape but for the number of blocks; None where there is
            none, and then nothing is copied to it.
    """

    copies_beside_steps = False

    def __init__(self, decoder: Decoder, target: Tensor, arena: Tensor | None = None) -> None:
        self._decoder, self._target, self._arena = decoder, target, arena
        self._jobs: deque[CopyJob | SwapJob] = deque()

    @property
    def depth(self) -> int:
        """See `Turns.depth`."""
        return self._decoder.depth

    def submit(self, job: CopyJob | SwapJob) -> None:
        """See `Turns.submit`."""
        self._jobs.append(job)

    def set_peer(self, kv: Tensor | None) -> None:
        """See `Turns.set_peer`."""
        self._decoder.set_peer(kv)

    def interrupt(self) -> None:
        """See `Turns.interrupt`; these turns never wait."""

    def take(self, steps: Sequence[DecodeStep]) -> TurnResult:
        """See `Turns.take`."""
        copies = [self._copy(self._jobs.popleft()) for _ in range(len(self._jobs))]
        return TurnResult(copies=copies, step=self._step(steps) if steps else None)

    def _step(self, steps: Sequence[DecodeStep]) -> StepResult:
        began_ns = time.monotonic_ns()
        self._decoder.launch(steps)
        collected = self._decoder.collect()
        done_ns = time.monotonic_ns()
        return StepResult(
            token_ids=collected.token_ids,
            done_ns=done_ns,
            seconds=(done_ns - began_ns) / NS_PER_S,
            device_ns=collected.device_ns,
        )

    def _copy(self, job: CopyJob | SwapJob) -> CopyDone:
        start_ns = time.monotonic_ns()
        copy_blocks(*ends_of(job, self._target, self._arena))
        return CopyDone(job=job, is_complete=True, start_ns=start_ns, done_ns=time.monotonic_ns())


def ends_of(
    job: CopyJob | SwapJob, pool: Tensor, arena: Tensor | None
) -> tuple[Tensor, Tensor, Sequence[int], Sequence[int]]:
    """Return source and target of a copy, and the blocks in each.

    Args:
        job: What is to be copied.
        pool: The own pool's tensor.
        arena: The arena's.
    """

    def own(*, is_arena: bool) -> Tensor:
        if not is_arena:
            return pool
        assert arena is not None, "places in the arena are taken where there is one"
        return arena

    if isinstance(job, SwapJob):
        swap = job.swap
        source, target = own(is_arena=not swap.is_out), own(is_arena=swap.is_out)
        return source, target, swap.sources, swap.targets
    copy = job.copy
    target = own(is_arena=copy.is_to_arena)
    return job.session.peer_pool.kv, target, copy.sources, copy.targets
