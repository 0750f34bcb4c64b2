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
        arena: Host memory for sequences that make room; None where there is none.
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
        arena: BlockAllocator | None,
        clock: Clock,
    ) -> None:
        self._scheduler, self._book, self._desk = scheduler, book, desk
        self._allocator, self._layout, self._clock = allocator, layout, clock
        self._arena = arena

    def queues(self) -> dict[str, Queue]:
        """Return where sequences are; `unsent` are clients that do not take what waits for them."""
        now_s = self._now_s()
        pulling: list[float] = []
        running: list[float] = []
        for sequence in self._book.living:
            if not sequence.preempted_ns:
                group = running if sequence.has_started else pulling
                group.append(sequence.adopted_ns / NS_PER_S)
        swapped = [sequence.preempted_ns / NS_PER_S for sequence in self._preempted]
        unsent = [since_s for since_s in self._book.unsent_since_s if since_s is not None]
        return {
            "pulling": Queue.since(pulling, now_s),
            "running": Queue.since(running, now_s),
            "swapped": Queue.since(swapped, now_s),
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
                "swapped": len(self._scheduler.swapped),
            },
            "swap": self._swap_status(),
            "slots": self._slots_status(),
            "link": self._link_status(),
            "requests": progress_of(self._book.living, self._row),
        }

    def slots(self) -> Slots:
        """Return how many slots the blocks of sequences have, and how many hold a token."""
        holding = [sequence for sequence in self._book.living if sequence.blocks]
        return Slots(
            reserved=sum(sequence.num_slots for sequence in holding),
            # What was read in place and went to the arena has tokens that are not in `blocks`.
            used=sum(
                min(sequence.num_slots, sequence.num_tokens + len(sequence.new_ids))
                for sequence in holding
            ),
        )

    def declare(self, metrics: Metrics) -> None:
        """Declare everything above as gauges."""
        declare_pool_gauges(metrics, self._allocator, block_bytes=self._layout.block_bytes)
        declare_slot_gauges(metrics, self.slots)
        metrics.gauges_from(
            "kvpair_swap_arena_blocks",
            "Blocks of host memory for sequences that make room.",
            "state",
            lambda: {"used": self._num_arena_used, "free": self._num_arena - self._num_arena_used},
        )
        declare_queue_gauges(metrics, self.queues)
        declare_link_gauges(metrics, self._link_status)

    @property
    def _preempted(self) -> list[Sequence]:
        return [sequence for sequence in self._book.living if sequence.preempted_ns]

    @property
    def _num_arena(self) -> int:
        return 0 if self._arena is None else self._arena.num_blocks - 1

    @property
    def _num_arena_used(self) -> int:
        return 0 if self._arena is None else self._num_arena - self._arena.num_free

    def _swap_status(self) -> dict[str, object]:
        return {
            "blocks": self._num_arena,
            "used": self._num_arena_used,
            "oldest_s": round(self.queues()["swapped"].oldest_s, 3),
        }

    def _slots_status(self) -> dict[str, object]:
        slots = self.slots()
        return {"reserved": slots.reserved, "unused": slots.reserved - slots.used}

    @property
    def _living_session(self) -> LinkSession | None:
        sessions = (session for session in self._desk.links.sessions if not session.is_lost)
        return next(sessions, None)

    def _link_status(self) -> dict[str, object]:
        session = self._living_session
        return {"state": "waiting"} if session is None else session.status()

    def _row(self, sequence: Sequence) -> dict[str, object]:
        return {
            "id": sequence.state.id,
            "state": _state_of(sequence),
            "tokens": sequence.completion_tokens,
            "of": sequence.state.max_tokens,
            "age_s": round(self._now_s() - sequence.state.arrived_ns / NS_PER_S, 3),
        }

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S


def _state_of(sequence: Sequence) -> str:
    if sequence.preempted_ns:
        return "swapped"
    return "running" if sequence.has_started else "pulling"
