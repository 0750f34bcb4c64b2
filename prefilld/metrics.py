"""What prefilld counts; each metric is declared here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.metrics import Metrics


class PrefillMetrics:
    """prefilld's counters and distributions.

    Args:
        metrics: The daemon's registry.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.accepted = metrics.counter(
            "kvpair_requests_accepted_total", "Requests that passed every check."
        )
        self.failed = metrics.counter(
            "kvpair_requests_failed_total", "Requests answered by ERROR, by its code.", ["code"]
        )
        self.ended = metrics.counter(
            "kvpair_requests_ended_total",
            "Answers that ended at prefilld, by reason; `gone` is a client that went away.",
            ["reason"],
        )
        self.prompt_tokens = metrics.counter(
            "kvpair_prompt_tokens_total", "Prompt tokens computed."
        )
        self.chunks = metrics.counter("kvpair_chunks_announced_total", "CHUNK frames sent.")
        self.handoffs = metrics.counter("kvpair_handoffs_sent_total", "HANDOFF frames sent.")
        self.adopted = metrics.counter("kvpair_handoffs_adopted_total", "Hand-offs adopted.")
        self.returned = metrics.counter(
            "kvpair_handoffs_returned_total",
            "Hand-offs that came back, by cause: `link-lost`, or the code of a REJECT.",
            ["cause"],
        )
        self.ignored = metrics.counter(
            "kvpair_lease_messages_ignored_total",
            "Late, doubled or unknown messages about leases, by kind.",
            ["kind"],
        )
        self.links = metrics.counter("kvpair_links_opened_total", "Links that were proved.")
        self.links_lost = metrics.counter("kvpair_links_lost_total", "Links that ended.")
        self.protocol_errors = metrics.counter(
            "kvpair_protocol_errors_total", "Peers that broke the protocol, by code.", ["code"]
        )
        self.queue_seconds = metrics.histogram(
            "kvpair_queue_seconds", "From a request's arrival to its first chunk."
        )
        self.prefill_seconds = metrics.histogram(
            "kvpair_prefill_seconds", "From a request's first chunk to its first token."
        )
        self.adopt_seconds = metrics.histogram(
            "kvpair_handoff_adopt_seconds", "From HANDOFF to ADOPT, as prefilld sees it."
        )
