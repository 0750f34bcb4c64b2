"""One turn of decoded's engine: copy some blocks, then one step for the whole batch.

A turn is what the engine thread does between two looks at the event loop.  Copies are bounded, so
that a long prompt that arrives delays the running streams by a known part of a step and not by
its length; they come first, since the sequence that waits for them can then join the next step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.kv.pull import copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from decoded.lease_effects import BlockCopy
    from shared.engine.batch import SequenceStep
    from shared.engine.runner import ModelRunner
    from shared.ops.logprobs import TokenLogprob

BUSY_COPY_BYTES = 32 << 20
"""Bytes to copy in a turn beside a step.

At the 4 to 8 GB/s of one core they take 4 to 8 ms: a fifth at most of an embedded model's step.
"""

IDLE_COPY_BYTES = 256 << 20
"""Bytes to copy in a turn without a step: bounds how long a cancel waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """One lease's copy: from which pool, and which blocks."""

    source: Tensor
    """The mapped pool's tensor."""
    copy: BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a turn did; times are CLOCK_MONOTONIC in ns."""

    token_ids: tuple[int | None, ...]
    """One for each step, in their order."""
    logprobs: tuple[TokenLogprob | None, ...]
    """The same: how likely each token was, where that was asked for."""
    copy_start_ns: int
    copy_done_ns: int
    step_done_ns: int


def run_turn(
    runner: ModelRunner, target: Tensor, copies: Sequence[CopyJob], steps: Sequence[SequenceStep]
) -> TurnResult:
    """Copy blocks into decoded's own pool, then compute one step.  On the engine thread.

    Args:
        runner: The model over decoded's own pool.
        target: That pool's tensor.
        copies: What to copy; when this returns, it is copied.
        steps: One for each sequence of the batch; may be empty.
    """
    copy_start_ns = time.monotonic_ns()
    for job in copies:
        copy_blocks(job.source, target, job.copy.sources, job.copy.targets)
    copy_done_ns = time.monotonic_ns()
    result = runner.execute(steps) if steps else None
    return TurnResult(
        token_ids=result.token_ids if result else (),
        logprobs=result.logprobs if result else (),
        copy_start_ns=copy_start_ns,
        copy_done_ns=copy_done_ns,
        step_done_ns=time.monotonic_ns(),
    )
