"""CUDA without a GPU: memory, handles and events by the book, in this process's memory.

`FakeGpus` is the machine, `FakeCuda` a process on it.  Memory lives until its maker has freed it
and every mapping is closed, as with the real driver.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import torch

from shared.kv.cuda_driver import AddressRange
from shared.kv.cuda_runtime import HANDLE_BYTES, Memory, View
from shared.kv.cuda_status import cuda_error

GIB = 1 << 30


@dataclass(eq=False)
class Allocation:
    base: int
    memory: bytearray
    maker: FakeCuda
    is_freed: bool = False
    num_mappings: int = 0


@dataclass(eq=False)
class Event:
    maker: FakeCuda
    status: int = 0
    """What asking gives: never recorded counts as complete."""
    streams: list[int] = field(default_factory=list)
    """On which it was recorded."""


@dataclass
class FakeGpus:
    total_bytes: int = GIB
    allocations: dict[bytes, Allocation] = field(default_factory=dict)
    """By handle."""
    events: dict[bytes, Event] = field(default_factory=dict)
    """By handle."""
    numbers: count[int] = field(default_factory=lambda: count(1))

    @property
    def held_bytes(self) -> int:
        """Memory that is not free again."""
        return sum(
            len(item.memory)
            for item in self.allocations.values()
            if item.num_mappings or not item.is_freed
        )

    def handle(self) -> bytes:
        return next(self.numbers).to_bytes(8, "big").rjust(HANDLE_BYTES, b"h")


class FakeCuda:
    """One process.

    Args:
        gpus: The machine.
        base_gap: Bytes of the driver's allocation in front of what `allocate` returns.
    """

    def __init__(self, gpus: FakeGpus, *, base_gap: int = 0) -> None:
        self.gpus, self.base_gap = gpus, base_gap
        self.fails: dict[str, int] = {}
        """Status that a call gives, by the call's name."""
        self.fails_after: Counter[str] = Counter()
        """How many calls of that name go well before."""
        self.calls: list[str] = []
        self.device: int | None = None
        self.can_tell_ranges = True
        self.can_export: bool | None = True
        self.pinned: dict[int, int] = {}
        """Bytes of pinned host memory, by its address."""
        self._mapped: dict[int, Allocation] = {}
        self._events: dict[int, Event] = {}
        self._numbers = count(1)

    @property
    def num_events(self) -> int:
        """Events made or opened and not destroyed."""
        return len(self._events)

    def event(self, slot: int) -> Event:
        """Return the event that this process made or opened as number `slot`."""
        return list(self._events.values())[slot]

    def use_device(self, index: int) -> None:
        self._enter("use_device")
        self.device = index

    def allocate(self, num_bytes: int) -> int:
        self._enter("allocate")
        if self.gpus.held_bytes + num_bytes > self.gpus.total_bytes:
            raise cuda_error("allocate", 2)
        base = next(self.gpus.numbers) << 40
        allocation = Allocation(base, bytearray(self.base_gap + num_bytes), self)
        self.gpus.allocations[self.gpus.handle()] = allocation
        self._mapped[base] = allocation
        return base + self.base_gap

    def free(self, address: int) -> None:
        self._enter("free")
        allocation = self._mapped.pop(address - self.base_gap)
        assert not allocation.is_freed
        allocation.is_freed = True

    def pin(self, address: int, num_bytes: int) -> None:
        self._enter("pin")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        self._enter("unpin")
        del self.pinned[address]

    def export_memory(self, address: int) -> bytes:
        self._enter("export_memory")
        allocation = self._around(address)
        (handle,) = (key for key, item in self.gpus.allocations.items() if item is allocation)
        return handle

    def open_memory(self, handle: bytes) -> int:
        self._enter("open_memory")
        allocation = self.gpus.allocations.get(handle)
        if allocation is None:
            raise cuda_error("open_memory", 1)
        if allocation.maker is self:
            raise cuda_error("open_memory", 201)
        allocation.num_mappings += 1
        self._mapped[allocation.base] = allocation
        return allocation.base

    def close_memory(self, address: int) -> None:
        self._enter("close_memory")
        allocation = self._mapped[address]
        assert allocation.num_mappings > 0, "closed more often than opened"
        allocation.num_mappings -= 1

    def address_range(self, address: int) -> AddressRange | None:
        if not self.can_tell_ranges:
            return None
        allocation = self._around(address)
        return AddressRange(allocation.base, len(allocation.memory))

    def is_exportable(self, address: int) -> bool | None:
        self._around(address)
        return self.can_export

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"

    def memory(self) -> Memory:
        return Memory(self.gpus.total_bytes - self.gpus.held_bytes, self.gpus.total_bytes)

    def create_event(self) -> int:
        self._enter("create_event")
        return self._keep(Event(self))

    def export_event(self, event: int) -> bytes:
        self._enter("export_event")
        handle = self.gpus.handle()
        self.gpus.events[handle] = self._events[event]
        return handle

    def open_event(self, handle: bytes) -> int:
        self._enter("open_event")
        event = self.gpus.events.get(handle)
        if event is None:
            raise cuda_error("open_event", 400)
        return self._keep(event)

    def destroy_event(self, event: int) -> None:
        self._enter("destroy_event")
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        self._enter("record_event")
        self._events[event].streams.append(stream)
        self._events[event].status = 600

    def is_event_done(self, event: int) -> bool:
        status = self._events[event].status
        if status not in (0, 600):
            raise cuda_error("is_event_done", status)
        return status == 0

    def synchronize(self) -> None:
        self._enter("synchronize")

    def view(self, address: int, num_bytes: int, device: int) -> View:
        self._enter("view")
        assert device == self.device
        allocation = self._around(address)
        start = address - allocation.base
        window = memoryview(allocation.memory)[start : start + num_bytes]
        # Torch keeps the object that it was given, so the window lives as long as a view does.
        return View(torch.frombuffer(window, dtype=torch.uint8), weakref.ref(window))

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            self.fails_after[call] -= 1
            if self.fails_after[call] < 0:
                raise cuda_error(call, self.fails[call])

    def _around(self, address: int) -> Allocation:
        for base, allocation in self._mapped.items():
            if base <= address < base + len(allocation.memory):
                return allocation
        raise cuda_error("address", 1)

    def _keep(self, event: Event) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number
