"""What a decode step brought, as the engine thread tells the event loop.  Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step's, for a whole batch or for one sequence."""

    token_ids: tuple[int, ...]
    """What it sampled, in the order of its sequences."""
    done_ns: int
    """When the host knew it, on CLOCK_MONOTONIC."""
    seconds: float
    """How long it took: from its launch, or from the end of the step before where that is later."""
    device_ns: int | None = None
    """How long it took the GPU, by its clock; None on a CPU."""
