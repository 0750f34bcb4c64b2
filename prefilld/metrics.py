"""What prefilld counts; each metric is declared here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.request import Request
    from protocol.messages import Welcome
    from shared.kv.holds import CacheUse
    from shared.metrics import Metrics

STEP_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Buckets for tokens of a step; `prefilld.token_budget` is 512 unless it is configured."""


class PrefillMetrics:
    """prefilld's counters and distributions.

    Args:
        metrics: The daemon's registry.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.accepted = metrics.counter(
            "kvpair_requests_accepted_total", "Requests that passed every check."
        )
        self.resumed = metrics.counter(
            "kvpair_requests_resumed_total", "Requests that go on with an answer that broke off."
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
        self.peer_restarts = metrics.counter(
            "kvpair_peer_restarts_total", "Links to a decoded that was another process before."
        )
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
        self.ttft_seconds = metrics.histogram(
            "kvpair_ttft_seconds",
            "From a request's arrival to its first token; resumed answers are not counted.",
        )
        self.ready_seconds = metrics.histogram(
            "kvpair_handoff_ready_seconds",
            "From the first token to HANDOFF: the wait for a link, for room, for a slow client.",
        )
        self.adopt_seconds = metrics.histogram(
            "kvpair_handoff_adopt_seconds", "From HANDOFF to ADOPT, as prefilld sees it."
        )
        self.step_seconds = metrics.histogram(
            "kvpair_prefill_step_seconds", "One step, from the loop's order to its return."
        )
        self.step_device_seconds = metrics.histogram(
            "kvpair_prefill_step_device_seconds", "The GPU's time for one step; none on a CPU."
        )
        self.prefill_device_seconds = metrics.histogram(
            "kvpair_prefill_device_seconds",
            "The GPU's time for all steps that computed a prompt; none on a CPU.",
        )
        self.step_tokens = metrics.histogram(
            "kvpair_prefill_step_tokens", "Prompt tokens of a step.", buckets=STEP_TOKENS
        )

    def link_opened(self, *, before: Welcome | None, now: Welcome) -> None:
        """Count a link that was proved, and whether it leads to another process than before."""
        self.links.inc()
        if before is not None and before.instance != now.instance:
            self.peer_restarts.inc()

    def stepped(self, *, num_tokens: int, duration_ns: int, device_ns: int | None = None) -> None:
        """Count a step, and what it took the GPU where one computed it."""
        self.prompt_tokens.inc(num_tokens)
        self.step_tokens.observe(num_tokens)
        self.step_seconds.observe(duration_ns / NS_PER_S)
        if device_ns is not None:
            self.step_device_seconds.observe(device_ns / NS_PER_S)

    def first_token(self, request: Request) -> None:
        """Count what a request waited until its first token."""
        self.queue_seconds.observe((request.started_ns - request.arrived_ns) / NS_PER_S)
        self.prefill_seconds.observe((request.first_token_ns - request.started_ns) / NS_PER_S)
        if request.prefill_device_ns is not None:
            self.prefill_device_seconds.observe(request.prefill_device_ns / NS_PER_S)
        if not request.prompt.resumed_ids:
            self.ttft_seconds.observe((request.first_token_ns - request.arrived_ns) / NS_PER_S)


def declare_cache_metrics(metrics: Metrics, read: Callable[[], CacheUse]) -> None:
    """Tell what the prefix cache is good for; all are 0 where it is off, but for the misses."""
    metrics.counter_from(
        "kvpair_prefix_cache_hit_tokens_total",
        "Prompt tokens whose keys and values were found in the prefix cache.",
        lambda: read().hit_tokens,
    )
    metrics.counter_from(
        "kvpair_prefix_cache_missed_tokens_total",
        "Prompt tokens that were not, and had to be computed.",
        lambda: read().missed_tokens,
    )
    metrics.counter_from(
        "kvpair_prefix_cache_evicted_blocks_total",
        "Blocks that were given up to make room, the least recently used first.",
        lambda: read().evicted_blocks,
    )
    metrics.gauge_from(
        "kvpair_prefix_cache_blocks",
        "Blocks whose contents a later prompt could share, whether a request has them or not.",
        lambda: read().blocks,
    )
