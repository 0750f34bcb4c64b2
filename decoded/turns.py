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

from shared.kv.pull import copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from decoded.lease_effects import BlockCopy
    from decoded.link import LinkSession
    from shared.engine.decoding import Decoder, DecodeStep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyJob:
    """Blocks of one lease to pull."""

    session: LinkSession
    """The link whose pool they are in."""
    copy: BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyDone:
    """A copy that is not running any more; times are CLOCK_MONOTONIC in ns."""

    job: CopyJob
    is_complete: bool
    """False where it never ran: what it waited for will not come."""
    start_ns: int
    done_ns: int
    has_begun_step: bool = False
    """The step that came with it, `job.copy.early`, is launched and in flight, alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a turn found done."""

    copies: list[CopyDone]
    token_ids: tuple[int, ...] | None
    """What the oldest step in flight sampled, in its order; None where no step is done."""
    step_done_ns: int
    """When the host knew it, on CLOCK_MONOTONIC."""
    step_seconds: float | None = None
    """How long that step took, where the engine knows."""


class Turns(Protocol):
    """Takes turns.  `take` is called on the engine thread, the rest on the event loop's."""

    @property
    def depth(self) -> int:
        """Most steps that may be launched and not reported."""

    @property
    def copies_beside_steps(self) -> bool:
        """Whether `submit` may be called during a turn, whatever the size of the copy."""

    def submit(self, job: CopyJob) -> None:
        """Have blocks copied; `take` reports it."""

    def set_peer(self, kv: Tensor | None) -> None:
        """Read blocks of a peer's pool in place, or of none any more; on the engine thread.

        With None, no step that reads one is in flight.
        """

    def interrupt(self) -> None:
        """Let a turn that waits for copies alone come back: there is something to launch."""

    def take(self, steps: Sequence[DecodeStep]) -> TurnResult:
        """Launch a step unless `steps` is empty, and return what is done by now.

        Waits for the oldest step in flight if none can be launched before it is collected; with no
        step in flight, for a copy.
        """


class EagerTurns:
    """Turns in which copies come first and the step second, all of it before `take` returns.

    The copies come first since the sequence that waits for them can then join the next step; the
    caller bounds them, so that a long prompt that arrives delays running streams by a known part
    of a step.

    Args:
        decoder: What computes steps.
        target: The own pool's tensor.
    """

    copies_beside_steps = False

    def __init__(self, decoder: Decoder, target: Tensor) -> None:
        self._decoder, self._target = decoder, target
        self._jobs: deque[CopyJob] = deque()

    @property
    def depth(self) -> int:
        """See `Turns.depth`."""
        return self._decoder.depth

    def submit(self, job: CopyJob) -> None:
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
        began_ns = time.monotonic_ns()
        if steps:
            self._decoder.launch(steps)
        token_ids = self._decoder.collect() if self._decoder.num_in_flight else None
        done_ns = time.monotonic_ns()
        return TurnResult(
            copies=copies,
            token_ids=token_ids,
            step_done_ns=done_ns,
            step_seconds=None if token_ids is None else (done_ns - began_ns) / 1e9,
        )

    def _copy(self, job: CopyJob) -> CopyDone:
        start_ns = time.monotonic_ns()
        copy_blocks(job.session.peer_pool.kv, self._target, job.copy.sources, job.copy.targets)
        return CopyDone(job=job, is_complete=True, start_ns=start_ns, done_ns=time.monotonic_ns())
