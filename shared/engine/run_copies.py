"""Copies blocks between a GPU and other memory, beside the steps: by the copy engine alone.

The other memory is pinned host memory, or another GPU's.  Nothing of a multiprocessor is taken
from the step that runs meanwhile.  A run of neighbouring blocks is one copy.  Copies are enqueued
some at a time, on a stream of their own: the thread that enqueues them launches steps as well, and
the next step must not wait for a thousand of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.engine.device_stream import DeviceStream
from shared.engine.device_timing import add_device_ns
from shared.kv.pull import check_copy, runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import Tensor

    from shared.engine.device_timing import Timing
    from shared.kv.pull import BlockRun

RUNS_AT_ONCE = 16
"""Copies that are enqueued together: 0.1 ms of the host at 5 us each, and, at 2 MiB a block of the
8B shape over PCIe, six times as long of the copy engine."""


class RunCopies:
    """See `shared.engine.block_puller.BlockPuller`.

    Args:
        target: Where blocks are copied to; it or the source is on the GPU.
        device: The GPU.
    """

    def __init__(self, target: Tensor, device: torch.device) -> None:
        self._target = target
        self._stream = DeviceStream(device, is_urgent=False)

    def prepare(
        self, source: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> RunCopy:
        """See `BlockPuller.prepare`."""
        check_copy(source, self._target, source_ids, target_ids)
        return self.prepare_runs(source, runs(source_ids, target_ids))

    def prepare_runs(self, source: Tensor, found: Iterable[BlockRun]) -> RunCopy:
        """Make ready to copy runs of a copy that was checked."""
        return RunCopy(self._stream, source, self._target, iter(found))


class RunCopy:
    """See `shared.engine.block_puller.PreparedCopy`."""

    def __init__(
        self, stream: DeviceStream, source: Tensor, target: Tensor, left: Iterator[BlockRun]
    ) -> None:
        self._stream, self._source, self._target = stream, source, target
        self._left = left
        self._next: BlockRun | None = next(left, None)
        self._timing: Timing | None = None
        """Of the copies that were enqueued last."""
        self._is_done = False
        self._device_ns: int | None = None
        """Of those that are done; what passes between two lots of them is nobody's time."""

    def start(self, *, is_busy: bool) -> None:
        """Enqueue the first copies."""
        self._enqueue()

    def is_done(self) -> bool:
        """Enqueue more where the ones before are done; whether all are."""
        if self._is_done:
            return True
        timing = self._timing
        if timing is None or not timing.is_passed():
            return False
        if self._next is None:
            self._is_done = True
        else:  # before the times: the copy engine waits for it
            self._enqueue()
        self._device_ns = add_device_ns(self._device_ns, timing.device_ns())
        return self._is_done

    def device_ns(self) -> int | None:
        """See `PreparedCopy.device_ns`."""
        return self._device_ns

    def _enqueue(self) -> None:
        with self._stream.current():
            self._timing = self._stream.begin_timing()
            for _ in range(RUNS_AT_ONCE):
                run = self._next
                if run is None:
                    break
                source = self._source[run.source : run.source + run.num_blocks]
                target = self._target[run.target : run.target + run.num_blocks]
                target.copy_(source, non_blocking=True)
                self._next = next(self._left, None)
            self._timing.end()
