"""Pulls blocks out of a mapped pool beside the steps of a GPU, by a kernel or by the copy engine.

The kernel is one launch wherever the blocks lie, and every thread block of it takes something of a
multiprocessor from the step beside it.  The copy engine takes nothing of that kind, but needs a
command for each run of neighbouring blocks.  So nothing that decodes is disturbed by a kernel as
long as runs are long, which they are unless a pool is nearly full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from shared.engine.device_stream import DeviceStream
from shared.engine.run_copies import RunCopies
from shared.kv.pull import check_copy, copy_blocks, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.device_timing import Timing

IDLE_PROGRAMS = 128
"""Thread blocks of a pull while nothing decodes; NVLink is nearly full at 64."""

BUSY_PROGRAMS = 64
"""Beside decode steps of the 8B shape, batch 16: 138 GB/s over NVLink, for a sixth of the step's
speed while it lasts.  Fewer take longer and cost more in all (`tests.benchmarks.gpu_pull`)."""

MIN_RUN_BLOCKS = 4
"""Blocks of a run, on average, from which on the copy engine pulls beside steps: 189 GB/s for 7 %
of the step's speed.  A command takes the host some 20 us, which shorter runs make too much of."""


class PreparedCopy(Protocol):
    """A copy of which everything is ready but what it copies."""

    def start(self, *, is_busy: bool) -> None:
        """Begin to copy: what the sources hold is written by now.

        Args:
            is_busy: Whether steps run beside the copy.
        """

    def is_done(self) -> bool:
        """Whether every block is in the target; what is launched afterwards may read them."""

    def device_ns(self) -> int | None:
        """Return how long the copy took the GPU, once it is done; None where the CPU copied."""


class BlockPuller(Protocol):
    """Copies blocks into one pool.  All calls come from the engine thread."""

    def prepare(
        self, source: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> PreparedCopy:
        """Make ready to copy blocks, so that little is left to do when they are written.

        Args:
            source: A pool whose blocks are like the target's.
            source_ids: Block ids in the source.
            target_ids: Block ids in the target, one for each; no launched work touches them.

        Raises:
            CopyError: The pools or the ids do not fit together.
        """


class EagerPuller:
    """Copies at once, on the calling thread: for memory that a CPU reads."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def prepare(
        self, source: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> PreparedCopy:
        """See `BlockPuller.prepare`."""
        check_copy(source, self._target, source_ids, target_ids)
        return _EagerCopy(source, self._target, source_ids, target_ids)


class _EagerCopy:
    def __init__(
        self,
        source: Tensor,
        target: Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        self._work = (source, target, source_ids, target_ids)
        self._is_done = False

    def start(self, *, is_busy: bool) -> None:
        copy_blocks(*self._work)
        self._is_done = True

    def is_done(self) -> bool:
        return self._is_done

    def device_ns(self) -> int | None:
        return None


class CudaPuller:
    """Copies by the gather kernel on a side stream, or by the copy engine on another.

    Args:
        target: The own pool's tensor.
    """

    def __init__(self, target: Tensor) -> None:
        # Here, since only a machine with a GPU has a use for triton.
        from shared.ops.triton.gather_blocks import gather_blocks  # noqa: PLC0415

        self._gather_blocks, self._target = gather_blocks, target
        self._stream = DeviceStream(target.device, is_urgent=False)
        self._run_copies = RunCopies(target, target.device)
        self._free: list[_IdBuffers] = []
        self._warm_up()

    def prepare(
        self, source: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> PreparedCopy:
        """Upload the ids; see `BlockPuller.prepare`."""
        check_copy(source, self._target, source_ids, target_ids)
        buffers = self._take(len(source_ids))
        with self._stream.current():
            ids = buffers.fill(source_ids, target_ids)
        found = list(runs(source_ids, target_ids))
        has_long_runs = 0 < len(found) * MIN_RUN_BLOCKS <= len(source_ids)
        beside_steps = self._run_copies.prepare_runs(source, found) if has_long_runs else None
        return _CudaCopy(self, source, ids, buffers, beside_steps)

    def launch(self, source: Tensor, ids: Tensor, *, is_busy: bool) -> Timing:
        """Enqueue a prepared copy."""
        with self._stream.current():
            timing = self._stream.begin_timing()
            self._gather_blocks(
                source,
                self._target,
                ids[0],
                ids[1],
                num_programs=BUSY_PROGRAMS if is_busy else IDLE_PROGRAMS,
            )
            timing.end()
        return timing

    def give_back(self, buffers: _IdBuffers) -> None:
        """Let another copy have the buffers of one that is done."""
        self._free.append(buffers)

    def _take(self, num_blocks: int) -> _IdBuffers:
        """Return buffers that no copy on its way reads."""
        for index, buffers in enumerate(self._free):
            if buffers.capacity >= num_blocks:
                return self._free.pop(index)
        capacity = max(MIN_CAPACITY, 1 << (num_blocks - 1).bit_length())
        return _IdBuffers(capacity, self._target.device)

    def _warm_up(self) -> None:
        """Compile the kernel, and take buffers: the first prompt should not wait for either."""
        # One, a multiple of the alignment, and neither: triton may take them for three kinds.
        for num_blocks in (1, 2, 16):
            ids = list(range(1, min(1 + num_blocks, self._target.shape[0])))
            copy = self.prepare(self._target, ids, ids)
            copy.start(is_busy=False)
            self._stream.synchronize()
            copy.is_done()
            copy.device_ns()  # so that the first prompt finds the events of a timing as well


MIN_CAPACITY = 1024
"""Blocks whose ids a pair of buffers holds; 16,384 tokens of 16-token blocks."""


class _IdBuffers:
    """Block ids of one copy, on both sides."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        # Both rows begin where kernels know the alignment, whatever the number of ids.
        self._host = torch.empty(2, capacity, dtype=torch.int64, pin_memory=True)
        self._numbers = self._host.numpy()
        self._device = torch.empty(2, capacity, dtype=torch.int64, device=device)

    def fill(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> Tensor:
        """Enqueue the ids' way to the device, as [2, num_blocks]."""
        num_blocks = len(source_ids)
        self._numbers[0, :num_blocks] = source_ids
        self._numbers[1, :num_blocks] = target_ids
        self._device.copy_(self._host, non_blocking=True)
        return self._device[:, :num_blocks]


class _CudaCopy:
    """A copy on a side stream; its buffers are free again once it was seen done."""

    def __init__(
        self,
        puller: CudaPuller,
        source: Tensor,
        ids: Tensor,
        buffers: _IdBuffers,
        beside_steps: PreparedCopy | None,
    ) -> None:
        self._puller, self._source, self._ids = puller, source, ids
        self._buffers: _IdBuffers | None = buffers
        self._beside_steps, self._is_beside_steps = beside_steps, False
        self._timing: Timing | None = None

    def start(self, *, is_busy: bool) -> None:
        assert self._buffers is not None, "a copy starts once"
        if is_busy and self._beside_steps is not None:
            self._is_beside_steps = True
            self._beside_steps.start(is_busy=True)
            return
        self._timing = self._puller.launch(self._source, self._ids, is_busy=is_busy)

    def is_done(self) -> bool:
        if self._buffers is None:
            return True
        if self._is_beside_steps and self._beside_steps is not None:
            if not self._beside_steps.is_done():
                return False
        elif self._timing is None or not self._timing.is_passed():
            return False
        self._puller.give_back(self._buffers)
        self._buffers = None
        return True

    def device_ns(self) -> int | None:
        if self._is_beside_steps and self._beside_steps is not None:
            return self._beside_steps.device_ns()
        return None if self._timing is None else self._timing.device_ns()
