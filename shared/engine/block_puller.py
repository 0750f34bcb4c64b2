"""Pulls blocks out of a mapped pool beside the steps of a GPU: one kernel on a stream of its own.

How many thread blocks the kernel gets is the whole trade: 16 fill NVLink, but every one of them
takes memory bandwidth and a multiprocessor from the step beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from shared.kv.pull import check_copy, copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

IDLE_PROGRAMS = 64
"""Thread blocks of a pull while nothing decodes; NVLink is full from 16 on, a GPU's own memory
needs more."""

BUSY_PROGRAMS = 8
"""Beside decode steps: 150 GB/s and more over NVLink, for about a tenth of the step's speed."""


class PendingCopy(Protocol):
    """A copy that was begun."""

    def is_done(self) -> bool:
        """Whether every block is in the target; what is launched afterwards may read them."""


class BlockPuller(Protocol):
    """Copies blocks into one pool.  All calls come from the engine thread."""

    def start(
        self,
        source: Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        *,
        is_busy: bool,
    ) -> PendingCopy:
        """Begin to copy blocks.

        Args:
            source: A pool whose blocks are like the target's.
            source_ids: Block ids in the source; what they hold is written already.
            target_ids: Block ids in the target, one for each; no launched work touches them.
            is_busy: Whether steps run beside the copy.

        Raises:
            CopyError: The pools or the ids do not fit together; nothing was copied.
        """


class _Done:
    """A copy that was over before anybody asked."""

    def is_done(self) -> bool:
        return True


class EagerPuller:
    """Copies at once, on the calling thread: for memory that a CPU reads."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def start(
        self,
        source: Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        *,
        is_busy: bool,
    ) -> PendingCopy:
        """Copy blocks; see `BlockPuller.start`."""
        copy_blocks(source, self._target, source_ids, target_ids)
        return _Done()


class CudaPuller:
    """Copies by the gather kernel on a side stream.

    Args:
        target: The own pool's tensor.
    """

    def __init__(self, target: Tensor) -> None:
        # Here, since only a machine with a GPU has a use for triton.
        from shared.ops.triton.gather_blocks import gather_blocks  # noqa: PLC0415

        self._gather_blocks, self._target = gather_blocks, target
        # A low priority: where multiprocessors are short, steps go first.
        self._stream = torch.cuda.Stream(target.device, priority=0)

    def start(
        self,
        source: Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        *,
        is_busy: bool,
    ) -> PendingCopy:
        """Launch the copy; see `BlockPuller.start`."""
        check_copy(source, self._target, source_ids, target_ids)
        ids = torch.tensor([list(source_ids), list(target_ids)], dtype=torch.int64).pin_memory()
        with torch.cuda.stream(self._stream):
            on_device = ids.to(self._target.device, non_blocking=True)
            self._gather_blocks(
                source,
                self._target,
                on_device[0],
                on_device[1],
                num_programs=BUSY_PROGRAMS if is_busy else IDLE_PROGRAMS,
            )
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Launched(event, ids)


class _Launched:
    """A copy on the side stream; keeps the ids in memory until they were read."""

    def __init__(self, event: torch.cuda.Event, ids: Tensor) -> None:
        self._event, self._ids = event, ids

    def is_done(self) -> bool:
        return bool(self._event.query())
