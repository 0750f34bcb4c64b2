"""What operators may ask about prefilld's requests: queues, progress, slots.  Read when asked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from prefilld.metrics import declare_cache_metrics
from prefilld.request import RequestState
from shared.clock import NS_PER_S
from shared.daemon.gauges import (
    Queue,
    Slots,
    declare_link_gauges,
    declare_pool_gauges,
    declare_queue_gauges,
    declare_slot_gauges,
)
from shared.daemon.status import pool_status, progress_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.reception import Reception
    from prefilld.request import Request
    from prefilld.serving import Serving
    from shared.clock import Clock
    from shared.kv.allocator import BlockAllocator
    from shared.kv.holds import BlockHolds
    from shared.kv.layout import KVLayout
    from shared.metrics import Metrics

_ENTERED_NS = {
    RequestState.WAITING: lambda request: request.arrived_ns,
    RequestState.RUNNING: lambda request: request.started_ns or request.arrived_ns,
    RequestState.READY: lambda request: request.first_token_ns,
    RequestState.SENT: lambda request: request.sent_ns,
}
"""When a request came into the state that it is in."""


class Overview:
    """prefilld's requests as operators see them.

    Args:
        serving: Requests that were accepted.
        reception: Requests that are being judged.
        allocator: prefilld's pool.
        holds: Who has which of its blocks, and its prefix cache.
        layout: That pool's.
        link_status: Returns what STATUS tells of the link.
        clock: Ages are told by it.
    """

    def __init__(
        self,
        *,
        serving: Serving,
        reception: Reception,
        allocator: BlockAllocator,
        holds: BlockHolds,
        layout: KVLayout,
        link_status: Callable[[], dict[str, object]],
        clock: Clock,
    ) -> None:
        self._serving, self._reception, self._clock = serving, reception, clock
        self._allocator, self._holds, self._layout = allocator, holds, layout
        self._link_status = link_status

    def queues(self) -> dict[str, Queue]:
        """Return where requests are: `judged` is before they are accepted."""
        now_s = self._now_s()
        entered: dict[RequestState, list[float]] = {state: [] for state in _ENTERED_NS}
        for request in self._serving.requests:
            if request.state in entered:
                entered[request.state].append(_ENTERED_NS[request.state](request) / NS_PER_S)
        return {"judged": Queue.since(self._reception.judging_since_s, now_s)} | {
            state.name.lower(): Queue.since(times, now_s) for state, times in entered.items()
        }

    def status(self) -> dict[str, object]:
        """Return what STATUS tells of pool, prefix cache, queues, link and single requests."""
        queues = self.queues()
        lengths: dict[str, object] = {name: queue.length for name, queue in queues.items()}
        return {
            "pool": pool_status(self._allocator, self._layout),
            "prefix_cache": dataclasses.asdict(self._holds.cache_use),
            "queue": lengths | {"oldest_s": round(queues["waiting"].oldest_s, 3)},
            "link": self._link_status(),
            "requests": progress_of(self._serving.requests, self._row),
        }

    def slots(self) -> Slots:
        """Return how many slots the blocks of requests have, and how many hold a token."""
        holding = [request for request in self._serving.requests if request.blocks]
        block_size = self._layout.block_size
        return Slots(
            reserved=sum(len(request.blocks) for request in holding) * block_size,
            used=sum(request.computed_tokens for request in holding),
        )

    def declare(self, metrics: Metrics) -> None:
        """Declare everything above as gauges."""
        declare_pool_gauges(metrics, self._allocator, block_bytes=self._layout.block_bytes)
        declare_slot_gauges(metrics, self.slots)
        declare_cache_metrics(metrics, lambda: self._holds.cache_use)
        declare_queue_gauges(metrics, self.queues)
        declare_link_gauges(metrics, self._link_status)

    def _row(self, request: Request) -> dict[str, object]:
        return {
            "id": request.id,
            "state": request.state.name.lower(),
            "tokens": request.computed_tokens,
            "of": request.num_tokens,
            "cached": request.cached_tokens,
            "age_s": round(self._now_s() - request.arrived_ns / NS_PER_S, 3),
        }

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S
