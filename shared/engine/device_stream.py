"""A stream of work on a device, and the host memory beside it; on a CPU, work is done at once.

The engines are written against this, so that on a machine without a GPU their tests run the same
code with nothing left out but the waiting.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import torch

from shared.engine.device_timing import DeviceTimer, Untimed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from shared.engine.device_timing import Timing


class Mark(Protocol):
    """A place in a stream."""

    def is_passed(self) -> bool:
        """Whether everything before it is done."""

    def wait(self) -> None:
        """Return when it is; the interpreter is free meanwhile."""


class _Passed:
    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def _new_timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class DeviceStream:
    """One stream.  All calls come from the engine thread.

    Args:
        device: Where its work runs.
        is_urgent: Whether it goes before what else runs there: steps do, copies do not.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool = True) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        priority = -1 if is_urgent else 0
        self._stream = torch.cuda.Stream(device, priority=priority) if is_cuda else None
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._timer = DeviceTimer(_new_timed_event, self._stream) if is_cuda else None

    @property
    def handle(self) -> int:
        """The stream as CUDA's runtime names it; 0 on a CPU."""
        return 0 if self._stream is None else int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        """Make it the stream that torch enqueues on."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """Mark the place behind everything that was enqueued until now."""
        if self._stream is None:
            return _Passed()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _EventMark(event)

    def begin_timing(self) -> Timing:
        """Begin to time what is enqueued from here until the timing's `end`."""
        return Untimed() if self._timer is None else self._timer.begin()

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""
        self.mark().wait()

    def follow_all(self) -> None:
        """Come behind whatever is enqueued on other streams now: buffers that were made there."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    def host_tensor(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return host memory that the device reads and writes without the host's help."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return host memory that is filled with a device tensor behind what is enqueued."""
        on_host = self.host_tensor(*tensor.shape, dtype=tensor.dtype)
        return on_host.copy_(tensor, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what runs `work` again: a graph captured now, or on a CPU the function itself.

        The work is run once before it is captured, so that every kernel is compiled.
        """
        if self._stream is None:
            return work
        with self.current():
            work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay
