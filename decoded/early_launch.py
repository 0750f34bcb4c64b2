"""Launches an early step (`early_step.py`) from within a turn.  On the engine thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoded.early_step import EarlyStep
    from decoded.turns import CopyJob
    from shared.engine.decoding import PreparingDecoder

REHEARSAL_NS = 100_000
"""Between two rehearsals.  After 20 ms without work a first step takes 0.7 ms more than a later one
(half of it is the host's), after 50 us 0.3 ms (one H200)."""


class EarlyLaunch:
    """One lease's early step, made ready.

    Args:
        early: The step.
        job: The lease's last copy, which it waits for.
        decoder: What computes it; no step is in flight.
    """

    def __init__(self, early: EarlyStep, job: CopyJob, decoder: PreparingDecoder) -> None:
        self._early, self._job, self._decoder = early, job, decoder
        self._prepared = decoder.prepare(early.step())
        self._rehearsed_ns = 0

    @property
    def token_id(self) -> int | None:
        """The first token, once the control page tells it."""
        return self._job.session.peer_pool.first_token(self._job.copy)

    def keep_warm(self, now_ns: int) -> None:
        """Rehearse, now and then, while the blocks are not written."""
        is_due = now_ns - self._rehearsed_ns >= REHEARSAL_NS
        # Not where it would take the GPU from the very prompt that is waited for.
        is_free = not self._job.session.peer_pool.is_on_same_device
        if is_due and is_free and not self._decoder.num_in_flight:
            self._rehearsed_ns = now_ns
            self._prepared.rehearse()

    def try_launch(self) -> bool:
        """Launch it behind the copy, which is complete; False where it cannot be, or must not."""
        token_id, pool = self.token_id, self._job.session.peer_pool
        if token_id is None or not pool.is_valid(self._job.copy):
            return False
        if not self._prepared.launch(token_id):
            return False
        self._early.token_id = token_id
        return True
