"""Where a request's time went, as END tells it: by the host's clock, and by the GPUs' own."""

from __future__ import annotations

from protocol.fields import Milliseconds, Nanoseconds, Part


class HandoffTimings(Part, frozen=True, kw_only=True):
    """When each stage of the hand-off was reached, in ms since prefilld knew the first token."""

    ready: Milliseconds
    """HANDOFF was given to the kernel."""
    adopted: Milliseconds
    """decoded owned the stream."""
    copy_start: Milliseconds
    """decoded began to copy the first block; 0 where it had begun while prefill still ran."""
    copy_done: Milliseconds
    """The last block was in decoded's own pool."""
    first_step: Milliseconds
    """decoded knew the second token."""


class DeviceTimings(Part, frozen=True, kw_only=True):
    """How long the GPUs were at a request, in ms by their own clocks.

    A stage that no GPU had a part in is None.  Where a GPU had nothing else to do, a stage also
    holds what the host needed until its work was there.
    """

    prefill: Milliseconds | None = None
    """The steps that computed its prompt, whoever else had a part in them."""
    pull: Milliseconds | None = None
    """The copies of its blocks, in sum; most of them run while prefill does."""
    last_pull: Milliseconds | None = None
    """The last of them, which waits for the prompt's last blocks."""
    first_step: Milliseconds | None = None
    """decoded's first step, which brings the second token."""


class Timings(Part, frozen=True, kw_only=True):
    """Where a request's time went, in ms."""

    queue: Milliseconds
    """From the request's arrival to its first chunk."""
    prefill: Milliseconds
    """From its first chunk to its first token."""
    decode: Milliseconds
    """From its first token to its last."""
    total: Milliseconds
    """From its arrival to END."""
    first_token_ns: Nanoseconds = 0
    """When prefilld knew the first token, on CLOCK_MONOTONIC, for clients of the same host."""
    handoff: HandoffTimings | None = None
    """None where the first token ended the answer, so nothing was handed over."""
    device: DeviceTimings | None = None
    """None where no GPU had a part in it."""
