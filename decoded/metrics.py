"""What decoded counts; each metric is declared here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from decoded.sequence import Sequence
    from shared.metrics import Metrics

BATCH_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Buckets for sequences of a step; `decoded.max_batch` is 32 unless it is configured."""

PULL_BYTES_PER_S = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 6e10, 1e11, 1.5e11, 2e11, 3e11, 4e11, 1e12)
"""Buckets for the speed of copies: from a busy CPU's memory, through PCIe, to NVLink and HBM."""

STAGES = ("adopt", "copy_wait", "copy", "step_wait")
"""The stages of a hand-off as decoded sees them, in their order."""


class DecodeMetrics:
    """decoded's counters and distributions.

    Args:
        metrics: The daemon's registry.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.adopted = metrics.counter("kvpair_handoffs_adopted_total", "Hand-offs adopted.")
        self.rejected = metrics.counter(
            "kvpair_handoffs_rejected_total", "Hand-offs not taken, by code.", ["code"]
        )
        self.ended = metrics.counter(
            "kvpair_requests_ended_total",
            "Answers that ended here, by reason; `gone` is a client that went away.",
            ["reason"],
        )
        self.failed = metrics.counter(
            "kvpair_requests_failed_total", "Requests answered by ERROR, by its code.", ["code"]
        )
        self.generated_tokens = metrics.counter(
            "kvpair_generated_tokens_total", "Tokens sampled here."
        )
        self.steps = metrics.counter("kvpair_decode_steps_total", "Steps of the batch.")
        self.pulled_bytes = metrics.counter(
            "kvpair_pulled_bytes_total", "Bytes copied out of prefilld's pool."
        )
        self.voided = metrics.counter(
            "kvpair_copies_voided_total", "Copies whose lease was revoked under them."
        )
        self.ignored = metrics.counter(
            "kvpair_lease_messages_ignored_total",
            "Late, doubled or unknown messages about leases, by kind.",
            ["kind"],
        )
        self.links = metrics.counter("kvpair_links_opened_total", "Links that were taken.")
        self.links_lost = metrics.counter("kvpair_links_lost_total", "Links that ended.")
        self.links_refused = metrics.counter(
            "kvpair_links_refused_total", "Links refused, by code.", ["code"]
        )
        self.protocol_errors = metrics.counter(
            "kvpair_protocol_errors_total", "Peers that broke the protocol, by code.", ["code"]
        )
        self.preemptions = metrics.counter(
            "kvpair_preemptions_total",
            "Sequences that left the batch to make room, for host memory or for good.",
        )
        self.swapped_bytes = metrics.counter(
            "kvpair_swapped_bytes_total",
            "Bytes of such sequences copied to host memory (`out`) and back (`in`).",
            ["direction"],
        )
        self.swap_seconds = metrics.histogram(
            "kvpair_swap_seconds", "Single copies of their blocks, by direction.", ["direction"]
        )
        self.swap_device_seconds = metrics.histogram(
            "kvpair_swap_device_seconds",
            "The GPU's time for single ones, by direction; none on a CPU.",
            ["direction"],
        )
        self.swapped_seconds = metrics.histogram(
            "kvpair_swapped_out_seconds", "From a preemption until the sequence is back."
        )
        self.peer_restarts = metrics.counter(
            "kvpair_peer_restarts_total", "Links from a prefilld that was another process before."
        )
        self.pull_seconds = metrics.histogram(
            "kvpair_pull_seconds", "From ADOPT to the last block in decoded's own pool."
        )
        self.pull_device_seconds = metrics.histogram(
            "kvpair_pull_device_seconds", "The GPU's time for single copies; none on a CPU."
        )
        self.step_seconds = metrics.histogram("kvpair_decode_step_seconds", "One step.")
        self.step_device_seconds = metrics.histogram(
            "kvpair_decode_step_device_seconds", "The GPU's time for one step; none on a CPU."
        )
        self.batch_sequences = metrics.histogram(
            "kvpair_batch_sequences", "Sequences of a step.", buckets=BATCH_SEQUENCES
        )
        self.itl_seconds = metrics.distribution(
            "kvpair_itl_seconds",
            "From one token of a stream to its next, for the third token and all behind it.",
        )
        self.second_token_seconds = metrics.histogram(
            "kvpair_second_token_seconds", "From the first token to the second."
        )
        self.pull_rate = metrics.histogram(
            "kvpair_pull_bytes_per_second", "Speed of single copies.", buckets=PULL_BYTES_PER_S
        )
        self.handoff_seconds = metrics.histogram(
            "kvpair_handoff_stage_seconds",
            "Stages of a hand-off: HANDOFF to ADOPT, to the copy's begin, its end, the first step.",
            ["stage"],
        )
        self._stages = [self.handoff_seconds.labels(stage) for stage in STAGES]

    def copied(self, *, num_bytes: int, duration_ns: int, device_ns: int | None = None) -> None:
        """Count what was copied in one go, and what that took the GPU where one copied."""
        self.pulled_bytes.inc(num_bytes)
        self.pull_rate.observe(num_bytes / max(duration_ns, 1) * NS_PER_S)
        if device_ns is not None:
            self.pull_device_seconds.observe(device_ns / NS_PER_S)

    def swapped(
        self, *, num_bytes: int, duration_ns: int, is_out: bool, device_ns: int | None = None
    ) -> None:
        """Count a copy to host memory or back."""
        direction = "out" if is_out else "in"
        self.swapped_bytes.labels(direction).inc(num_bytes)
        self.swap_seconds.labels(direction).observe(duration_ns / NS_PER_S)
        if device_ns is not None:
            self.swap_device_seconds.labels(direction).observe(device_ns / NS_PER_S)

    def stepped(
        self,
        *,
        num_sequences: int,
        num_second: int,
        step_s: float,
        since_ns: int,
        device_ns: int | None = None,
    ) -> None:
        """Count a step, with one call whatever the size of its batch.

        Args:
            num_sequences: Of the batch, without those that had ended; each got one token.
            num_second: How many of them got the first token that was sampled here.
            step_s: How long the step took.
            since_ns: How long ago the previous step ended, in which all others took part.
            device_ns: How long the step took the GPU; None on a CPU.
        """
        self.steps.inc()
        self.generated_tokens.inc(num_sequences)
        self.batch_sequences.observe(num_sequences)
        self.step_seconds.observe(step_s)
        if device_ns is not None:
            self.step_device_seconds.observe(device_ns / NS_PER_S)
        if num_sequences > num_second:
            self.itl_seconds.observe(since_ns / NS_PER_S, num_sequences - num_second)

    def second_token(self, sequence: Sequence) -> None:
        """Count what a stream waited from its first token to its second, and where."""
        times = sequence.times
        waited_ns = times.first_step_ns - sequence.state.first_token_ns
        self.second_token_seconds.observe(max(0, waited_ns) / NS_PER_S)
        reached_ns = times.sent_ns
        edges_ns = (
            times.adopted_ns, times.copy_start_ns, times.copy_done_ns, times.first_step_ns
        )  # fmt: skip
        for stage, edge_ns in zip(self._stages, edges_ns, strict=True):
            # A copy may have begun, or even ended, while prefill still ran, and blocks that are
            # read in place are not copied at all: what took no time of its own counts as 0.
            stage.observe(max(0, edge_ns - reached_ns) / NS_PER_S)
            reached_ns = max(reached_ns, edge_ns)
