"""Who makes room for others and comes back: what the scheduler decides, told and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.swap_book import AfterCopy
from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from decoded.metrics import DecodeMetrics
    from decoded.scheduler import Scheduler
    from decoded.sequence import Sequence
    from decoded.sequences import SequenceBook
    from decoded.swap_book import BlockSwap
    from shared.service.frame import Service


class SwapDesk:
    """Between the scheduler and the loop.

    Args:
        service: Clock and log.
        scheduler: Decides who has to go, and who comes back.
        book: Where a sequence ends for which there is no room anywhere.
        block_bytes: Bytes of a block.
    """

    def __init__(
        self,
        *,
        service: Service,
        scheduler: Scheduler[Sequence],
        book: SequenceBook,
        metrics: DecodeMetrics,
        block_bytes: int,
    ) -> None:
        self._service, self._scheduler, self._book = service, scheduler, book
        self._metrics, self._block_bytes = metrics, block_bytes

    def next_batch(self) -> list[Sequence]:
        """Return the sequences of the next step; those without room anywhere end here."""
        batch = self._scheduler.next_batch()
        while dropped := self._scheduler.dropped:
            for sequence in dropped:
                self._count(sequence, is_swapped=False)
                self._book.fail(
                    sequence,
                    "preempted",
                    "decoded's pool is full and decoded.swap_gib has no room; "
                    "ask for the rest with `resume`",
                )
            batch = self._scheduler.next_batch()
        return batch

    def next_swaps(self, max_blocks: int) -> list[BlockSwap[Sequence]]:
        """Return what to copy to the arena and back, `max_blocks` in all."""
        for sequence in self._scheduler.take_preempted():
            self._count(sequence, is_swapped=True)
            sequence.preempted_ns = self._service.clock.monotonic_ns()
        return self._scheduler.next_swaps(max_blocks)

    def swapped(
        self, swap: BlockSwap[Sequence], *, duration_ns: int, device_ns: int | None
    ) -> None:
        """A copy of `next_swaps` is over."""
        self._metrics.swapped(
            num_bytes=len(swap.sources) * self._block_bytes,
            duration_ns=duration_ns,
            device_ns=device_ns,
            is_out=swap.is_out,
        )
        if self._scheduler.swap_done(swap) is AfterCopy.IS_BACK:
            sequence = swap.sequence
            waited_ns = self._service.clock.monotonic_ns() - sequence.preempted_ns
            sequence.preempted_ns = 0
            self._metrics.swapped_seconds.observe(waited_ns / NS_PER_S)
            self._service.log.info(
                "sequence.resumed",
                request_id=sequence.state.id,
                num_blocks=len(sequence.blocks),
                waited_us=waited_ns // 1000,
            )

    def _count(self, sequence: Sequence, *, is_swapped: bool) -> None:
        self._metrics.preemptions.inc()
        self._service.log.info(
            "sequence.preempted",
            request_id=sequence.state.id,
            num_blocks=len(sequence.blocks),
            is_swapped=is_swapped,
            completion_tokens=sequence.completion_tokens,
        )
