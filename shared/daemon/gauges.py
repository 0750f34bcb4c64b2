"""The gauges that both daemons have: blocks, queues, slots, the link.  Read when somebody asks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shared.kv.allocator import BlockAllocator
    from shared.metrics import Metrics

BYTES_PER_GB = 1e9
US_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One place where requests wait, or are worked on."""

    length: int
    oldest_s: float
    """How long the one that came first has been there; 0 where nobody is."""

    @classmethod
    def since(cls, entered_s: list[float], now_s: float) -> Queue:
        """Describe a queue by the times at which those in it came, on the monotonic clock."""
        return cls(length=len(entered_s), oldest_s=max(0.0, now_s - min(entered_s, default=now_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Places for tokens in the blocks that requests hold."""

    reserved: int
    used: int


def declare_pool_gauges(metrics: Metrics, allocator: BlockAllocator, *, block_bytes: int) -> None:
    """Tell of a pool's blocks by state, and whether they add up."""

    def by_state() -> dict[str, float]:
        counts = dataclasses.asdict(allocator.counts())
        del counts["total"]
        return counts

    metrics.gauges_from("kvpair_pool_blocks", "Blocks of this daemon's pool.", "state", by_state)
    metrics.gauge_from(
        "kvpair_pool_capacity_blocks", "All blocks of the pool.", lambda: allocator.num_blocks
    )
    metrics.gauge_from(
        "kvpair_pool_unaccounted_blocks",
        "Blocks that are in no state, or in two: anything but 0 is a fault of ours.",
        lambda: allocator.num_blocks - sum(by_state().values()),
    )
    metrics.gauge("kvpair_pool_block_bytes", "Size of a block.").set(block_bytes)


def declare_slot_gauges(metrics: Metrics, read: Callable[[], Slots]) -> None:
    """Tell how many of the reserved slots hold a token."""

    def by_use() -> dict[str, float]:
        slots = read()
        return {"used": slots.used, "unused": slots.reserved - slots.used}

    def unused_share() -> float:
        slots = read()
        return 1 - slots.used / slots.reserved if slots.reserved else 0.0

    metrics.gauges_from(
        "kvpair_reserved_slots", "Slots for tokens in blocks that requests hold.", "use", by_use
    )
    metrics.gauge_from(
        "kvpair_reserved_slots_unused_ratio", "Share of them that holds no token.", unused_share
    )


def declare_queue_gauges(metrics: Metrics, read: Callable[[], Mapping[str, Queue]]) -> None:
    """Tell how long each queue is, and how long its oldest has been in it."""
    metrics.gauges_from(
        "kvpair_queue_requests",
        "Requests by where they are.",
        "queue",
        lambda: {name: queue.length for name, queue in read().items()},
    )
    metrics.gauges_from(
        "kvpair_queue_oldest_seconds",
        "How long the oldest has been there.",
        "queue",
        lambda: {name: queue.oldest_s for name, queue in read().items()},
    )


def declare_link_gauges(metrics: Metrics, read: Callable[[], Mapping[str, object]]) -> None:
    """Tell of the link, from what STATUS tells of it."""

    def number(key: str, unit: float) -> float:
        value = read().get(key)
        return value * unit if isinstance(value, int | float) else float("nan")

    metrics.gauge_from(
        "kvpair_link_up",
        "1 where the link to the other daemon is open and proved.",
        lambda: float(read()["state"] == "open"),
    )
    metrics.gauge_from(
        "kvpair_link_rtt_seconds", "Last round trip.", lambda: number("rtt_us", 1 / US_PER_S)
    )
    metrics.gauge_from(
        "kvpair_link_bandwidth_bytes_per_second",
        "Of prefilld's pool as decoded read it at the hand-shake.",
        lambda: number("bandwidth_gb_s", BYTES_PER_GB),
    )
