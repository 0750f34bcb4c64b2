"""A device with a clock, and a stream whose work it times, on a machine without a GPU."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from shared.engine.device_stream import DeviceStream
from shared.engine.device_timing import DeviceTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shared.engine.device_timing import Timing

IDLE_MS, WORK_MS, BACK_MS = 100.0, 4.0, 1.0
"""What passes before work begins, what it takes, and what its way back to the host takes."""


class FakeDevice:
    """Does what was enqueued when it is told to; its clock goes on by what work takes."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.events: list[FakeEvent] = []
        """Every one that was made."""
        self._enqueued: deque[Callable[[], None]] = deque()

    def new_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def enqueue(self, work: Callable[[], None]) -> None:
        self._enqueued.append(work)

    def work(self, duration_ms: float) -> None:
        """Enqueue what takes so long."""

        def advance() -> None:
            self.now_ms += duration_ms

        self.enqueue(advance)

    def run(self) -> None:
        """Do everything that was enqueued."""
        while self._enqueued:
            self._enqueued.popleft()()


class FakeEvent:
    """What `torch.cuda.Event` does, on a `FakeDevice`."""

    def __init__(self) -> None:
        self._stamp_ms: float | None = None
        self._device: FakeDevice | None = None

    def record(self, stream: FakeDevice) -> None:
        self._stamp_ms, self._device = None, stream

        def stamp() -> None:
            self._stamp_ms = stream.now_ms

        stream.enqueue(stamp)

    def query(self) -> bool:
        return self._stamp_ms is not None

    def synchronize(self) -> None:
        if self._device is not None:
            self._device.run()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if self._stamp_ms is None or end_event._stamp_ms is None:
            raise RuntimeError("an event was not recorded, or is not done")
        return end_event._stamp_ms - self._stamp_ms


class TimedStream(DeviceStream):
    """A stream of the CPU whose work a fake device times; each piece takes `WORK_MS` of it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.fake = FakeDevice()
        self._fake_timer = DeviceTimer(self.fake.new_event, self.fake)

    def begin_timing(self) -> Timing:
        self.fake.work(IDLE_MS)
        timing = self._fake_timer.begin()
        self.fake.work(WORK_MS)
        return timing

    def to_host(self, tensor: Tensor) -> Tensor:
        self.fake.work(BACK_MS)
        return super().to_host(tensor)
