"""What decoded counts; each metric is declared here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.metrics import Metrics


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
        self.links = metrics.counter("kvpair_links_opened_total", "Links whose pool was proved.")
        self.links_refused = metrics.counter(
            "kvpair_links_refused_total", "Links refused, by code.", ["code"]
        )
        self.protocol_errors = metrics.counter(
            "kvpair_protocol_errors_total", "Peers that broke the protocol, by code.", ["code"]
        )
        self.pull_seconds = metrics.histogram(
            "kvpair_pull_seconds", "From ADOPT to the last block in decoded's own pool."
        )
        self.step_seconds = metrics.histogram("kvpair_decode_step_seconds", "One step.")
        self.second_token_seconds = metrics.histogram(
            "kvpair_second_token_seconds", "From the first token to the second."
        )
