"""The KV pool on GPUs: prefilld allocates and exports it by CUDA IPC, decoded maps it once.

What crosses over is a handle of the driver's whole allocation, where in it the pool begins, how
long it is, and a ring of events.  A handle has no length and no identity of its own: the size is
told and checked, and what was mapped is proved by its content (`shared.kv.proof`).

Events are recorded by prefilld and asked by decoded, on the host.  A stream must never wait for an
imported event: when its owner is killed the event stays open for ever, and with it the reader's
whole context.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from shared.kv.cuda_export import (
    MAX_NUM_EVENTS,
    PoolExport,
    check_export,
    create_events,
    export_memory,
    open_events,
    open_memory,
)
from shared.kv.cuda_pool import CudaPool, PoolMemory, allocate
from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.errors import PoolClosedError, UnknownEventError
from shared.kv.patience import PATIENCE_S

if TYPE_CHECKING:
    from shared.kv.cuda_runtime import CudaRuntime
    from shared.kv.layout import KVLayout

__all__ = ["DEFAULT_NUM_EVENTS", "CudaIpcMapping", "CudaIpcPool", "PoolExport"]

DEFAULT_NUM_EVENTS = 256
"""It may come round: all records are on one stream, so a later one only makes a reader wait
longer."""


class CudaIpcPool(CudaPool):
    """prefilld's pool: an allocation of its own, which others may map, and its ring of events.

    The peer should have closed its mapping before `close`.  Where it has not, the driver keeps the
    memory until it has.
    """

    def __init__(self, memory: PoolMemory, *, export: PoolExport, events: tuple[int, ...]) -> None:
        """Take over memory and events; `create` makes them."""
        super().__init__(memory, what="the pool")
        self._export, self._events = export, events
        self._next_event = 0

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        *,
        device: int,
        num_events: int = DEFAULT_NUM_EVENTS,
        fill: float | None = None,
        patience_s: float = PATIENCE_S,
        runtime: CudaRuntime | None = None,
    ) -> CudaIpcPool:
        """Allocate the whole pool at once, and export it.

        May wait, while a process that ends lets go of its memory.

        Args:
            layout: The pool's shape.
            device: Index of the GPU in this process.
            num_events: Length of the ring.
            fill: Write this number everywhere.  Without it the memory holds whatever it held.
            patience_s: How long to wait for memory that others hold.
            runtime: CUDA; None loads it.

        Raises:
            PoolAllocationError: There is no room, or this platform's memory cannot be exported.
            CudaCallError: CUDA failed, or is not there.
            ValueError: The ring's length is not 1 to `MAX_NUM_EVENTS`.
        """
        if not 1 <= num_events <= MAX_NUM_EVENTS:
            raise ValueError(f"a ring of {num_events} events is not one of 1 to {MAX_NUM_EVENTS}")
        runtime = runtime or CupyRuntime.load()
        runtime.use_device(device)
        with ExitStack() as undo:
            address = allocate(runtime, layout, device, undo, patience_s=patience_s)
            handle, offset = export_memory(runtime, address, layout.pool_bytes)
            events = create_events(runtime, num_events, undo)
            export = PoolExport(
                handle=handle,
                offset=offset,
                num_bytes=layout.pool_bytes,
                event_handles=tuple(map(runtime.export_event, events)),
            )
            memory = PoolMemory(
                layout=layout,
                runtime=runtime,
                device=device,
                address=address,
                undo=undo,
                fill=fill,
            )
            return cls(memory, export=export, events=events)

    def export(self) -> PoolExport:
        """Return what a peer needs to map the pool; the same for every peer.

        Raises:
            PoolClosedError: The pool is closed.
        """
        self._require_open()
        return self._export

    def record(self, stream: int) -> int:
        """Record the ring's next event, and return its slot.

        Args:
            stream: The stream that writes the pool, as a raw pointer (`cuda_stream`); always the
                same one, or a slot that comes round could complete too early.

        Raises:
            PoolClosedError: The pool is closed.
            CudaCallError: CUDA failed; no slot was taken.

        Only when this has returned may the peer be told of the slot: an event that was never
        recorded counts as complete.
        """
        self._require_open()
        slot = self._next_event
        self._runtime.record_event(self._events[slot], stream)
        self._next_event = (slot + 1) % len(self._events)
        return slot

    def _require_open(self) -> None:
        if self._kv is None:
            raise PoolClosedError(what=self._what)


class CudaIpcMapping(CudaPool):
    """decoded's view of prefilld's pool.  Its tensor must never be written, which nothing enforces.

    The mapping outlives prefilld, and keeps its memory from whoever comes next: after the peer's
    death it must be closed within a bounded time.
    """

    def __init__(self, memory: PoolMemory, *, events: tuple[int, ...]) -> None:
        """Take over memory and events; `open` opens them."""
        super().__init__(memory, what="the peer's pool")
        self._events = events

    @classmethod
    def open(
        cls,
        export: PoolExport,
        layout: KVLayout,
        *,
        device: int,
        runtime: CudaRuntime | None = None,
    ) -> CudaIpcMapping:
        """Map a pool, and open its events.

        Args:
            export: What the peer announced.
            layout: What the pool is believed to be, its number of blocks included.
            device: Index of the GPU that will read it; it may be another one than the pool's.
            runtime: CUDA; None loads it.

        Raises:
            PoolMappingError: Something is not as announced or as the layout needs, or cannot be
                opened.
            GpuMemoryError: This GPU has no room for what mapping takes.
            CudaCallError: CUDA is not there, or the GPU is lost.

        Whatever was opened before a failure is closed again.
        """
        check_export(export, layout)
        runtime = runtime or CupyRuntime.load()
        runtime.use_device(device)
        with ExitStack() as undo:
            base = open_memory(runtime, export, undo)
            events = open_events(runtime, export, undo)
            memory = PoolMemory(
                layout=layout,
                runtime=runtime,
                device=device,
                address=base + export.offset,
                undo=undo,
            )
            return cls(memory, events=events)

    @property
    def num_events(self) -> int:
        """Length of the peer's ring."""
        return len(self._events)

    def is_done(self, slot: int) -> bool:
        """Whether all that was on prefilld's stream at a slot's last record has finished.

        Never blocks.  What is enqueued here after it said True comes after the peer's writes.

        Raises:
            UnknownEventError: The ring has no such slot.
            PoolClosedError: The mapping is closed.
            GpuFatalError: The event can never complete, or this GPU is lost.

        Of a peer that was killed it may say False for ever: poll against a deadline.
        """
        if not 0 <= slot < len(self._events):
            raise UnknownEventError(slot=slot, num_events=len(self._events))
        if self._kv is None:
            raise PoolClosedError(what=self._what)
        return self._runtime.is_event_done(self._events[slot])
