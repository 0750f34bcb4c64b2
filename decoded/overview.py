"""What operators may ask about decoded's sequences: queues, progress, slots.  Read when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from decoded.adoption import AdoptionDesk
    from decoded.link import LinkSession
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook
    from shared.clock import Clock
    from shared.kv.allocator import BlockAllocator
    from shared.kv.layout import KVLayout
    from shared.metrics import Metrics


class Overview:
    """decoded's sequences as operators see them.

    Args:
        scheduler: The batch, and the places reserved beside it.
        book: The adopted sequences.
        desk: The links.
        allocator: decoded's own pool.
        layout: That pool's.
        clock: Ages are told by it.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler[Sequence],
        book: SequenceBook,
        desk: AdoptionDesk,
        allocator: BlockAllocator,
        layout: KVLayout,
        clock: Clock,
    ) -> None:
        self._scheduler, self._book, self._desk = scheduler, book, desk
        self._allocator, self._layout, self._clock = allocator, layout, clock

    def queues(self) -> dict[str, Queue]:
        """Return where sequences are; `unsent` are clients that do not take what waits for them."""
        now_s = self._now_s()
        pulling: list[float] = []
        running: list[float] = []
        for sequence in self._book.living:
            group = running if sequence.blocks else pulling
            group.append(sequence.times.adopted_ns / NS_PER_S)
        unsent = [since_s for since_s in self._book.unsent_since_s if since_s is not None]
        return {
            "pulling": Queue.since(pulling, now_s),
            "running": Queue.since(running, now_s),
            "unsent": Queue.since(unsent, now_s),
        }

    def status(self) -> dict[str, object]:
        """Return what STATUS tells of pool, batch, link and single requests."""
        session = self._living_session
        return {
            "epoch": None if session is None else session.epoch.hex(),
            "pool": pool_status(self._allocator, self._layout),
            "sequences": {
                "running": self._scheduler.num_running,
                "waiting": self._scheduler.num_reserved,
                "swapped": 0,
            },
            "link": self._link_status(),
            "requests": progress_of(self._book.living, self._row),
        }

    def slots(self) -> Slots:
        """Return how many slots the blocks of sequences have, and how many hold a token."""
        holding = [sequence for sequence in self._book.living if sequence.blocks]
        return Slots(
            reserved=sum(len(sequence.blocks) for sequence in holding) * self._layout.block_size,
            used=sum(sequence.num_tokens + len(sequence.new_ids) for sequence in holding),
        )

    def declare(self, metrics: Metrics) -> None:
        """Declare everything above as gauges."""
        declare_pool_gauges(metrics, self._allocator, block_bytes=self._layout.block_bytes)
        declare_slot_gauges(metrics, self.slots)
        declare_queue_gauges(metrics, self.queues)
        declare_link_gauges(metrics, self._link_status)

    @property
    def _living_session(self) -> LinkSession | None:
        sessions = (session for session in self._desk.sessions if not session.is_lost)
        return next(sessions, None)

    def _link_status(self) -> dict[str, object]:
        session = self._living_session
        return {"state": "waiting"} if session is None else session.status()

    def _row(self, sequence: Sequence) -> dict[str, object]:
        return {
            "id": sequence.state.id,
            "state": "running" if sequence.blocks else "pulling",
            "tokens": sequence.completion_tokens,
            "of": sequence.state.max_tokens,
            "age_s": round(self._now_s() - sequence.state.arrived_ns / NS_PER_S, 3),
        }

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S
