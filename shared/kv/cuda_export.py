"""What crosses over so that another process can map a pool: handles, where it begins, its length.

Checked on both sides: the handle names the driver's whole allocation, opens at its base whatever
address it was made from, and tells no length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.kv.cuda_runtime import HANDLE_BYTES
from shared.kv.cuda_status import (
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    MAP_FAILED,
    OPENED_BY_ITS_MAKER,
    PEER_ACCESS_UNSUPPORTED,
)
from shared.kv.errors import (
    CudaCallError,
    GpuFatalError,
    GpuMemoryError,
    MappingFault,
    PoolAllocationError,
    PoolMappingError,
)

if TYPE_CHECKING:
    from contextlib import ExitStack

    from shared.kv.cuda_runtime import CudaRuntime
    from shared.kv.layout import KVLayout

MAX_NUM_EVENTS = 4096
"""Their handles fit one frame, with room: 64 bytes each of 1 MiB."""

ALIGNMENT_BYTES = 256
"""Of whatever the driver allocates, so of every pool in it; the kernels load 16 bytes at a time."""

_FAULTS: dict[int | None, MappingFault] = {
    INVALID_VALUE: MappingFault.HANDLE,
    INVALID_HANDLE: MappingFault.HANDLE,
    OPENED_BY_ITS_MAKER: MappingFault.SELF,
    INVALID_DEVICE: MappingFault.PEER,
    MAP_FAILED: MappingFault.PEER,
    PEER_ACCESS_UNSUPPORTED: MappingFault.PEER,
}


@dataclass(frozen=True, slots=True)
class PoolExport:
    """What another process needs to map a pool.

    The handles are the right to read every prompt in it: never log them, and send them to nobody
    who has not been identified.
    """

    handle: bytes = field(repr=False)
    """Of the driver's allocation that the pool lies in."""
    offset: int
    """Bytes from the allocation's base to the pool."""
    num_bytes: int
    """Of the pool, its padding included."""
    event_handles: tuple[bytes, ...] = field(repr=False)
    """By slot."""


def export_memory(runtime: CudaRuntime, address: int, num_bytes: int) -> tuple[bytes, int]:
    """Return the handle of the allocation around a pool, and the pool's offset in it."""
    if runtime.is_exportable(address) is False:
        raise PoolAllocationError(
            num_bytes=num_bytes,
            reason="the driver does not let other processes open this GPU's memory",
            hint="CUDA IPC needs Linux on a discrete GPU; without it set both devices to cpu",
        )
    around = runtime.address_range(address)
    offset = 0 if around is None else address - around.base
    if around is not None and offset + num_bytes > around.num_bytes:
        raise PoolAllocationError(
            num_bytes=num_bytes,
            reason=f"the driver's allocation has {around.num_bytes} bytes, the pool begins at "
            f"{offset}",
        )
    return runtime.export_memory(address), offset


def check_export(export: PoolExport, layout: KVLayout) -> None:
    """Hold what the peer announced against the layout, before the driver sees any of it."""
    if export.num_bytes != layout.pool_bytes:
        raise PoolMappingError(
            fault=MappingFault.SIZE,
            message=f"the pool was announced with {export.num_bytes} bytes; "
            f"{layout.num_blocks} blocks of this layout take {layout.pool_bytes}",
        )
    if export.offset < 0 or export.offset % ALIGNMENT_BYTES:
        raise PoolMappingError(
            fault=MappingFault.SIZE,
            message=f"the pool was announced at offset {export.offset}, which is no multiple of "
            f"{ALIGNMENT_BYTES}",
        )
    if not 1 <= len(export.event_handles) <= MAX_NUM_EVENTS:
        raise PoolMappingError(
            fault=MappingFault.EVENTS,
            message=f"the pool was announced with {len(export.event_handles)} events, not 1 to "
            f"{MAX_NUM_EVENTS}",
        )
    for handle in (export.handle, *export.event_handles):
        if len(handle) != HANDLE_BYTES:
            raise PoolMappingError(
                fault=MappingFault.HANDLE,
                message=f"a handle has {len(handle)} bytes, not {HANDLE_BYTES}",
            )


def open_memory(runtime: CudaRuntime, export: PoolExport, undo: ExitStack) -> int:
    """Map the allocation, and return its base."""
    try:
        base = runtime.open_memory(export.handle)
    except (GpuFatalError, GpuMemoryError):
        raise
    except CudaCallError as error:
        fault = _FAULTS.get(error.status, MappingFault.MAP)
        raise PoolMappingError(
            fault=fault, message=f"the pool's handle does not open: {error}"
        ) from error
    undo.callback(runtime.close_memory, base)
    around = runtime.address_range(base)
    if around is not None and export.offset + export.num_bytes > around.num_bytes:
        raise PoolMappingError(
            fault=MappingFault.SIZE,
            message=f"the pool was announced with {export.num_bytes} bytes at offset "
            f"{export.offset}; the allocation has {around.num_bytes}",
        )
    return base


def create_events(runtime: CudaRuntime, num_events: int, undo: ExitStack) -> tuple[int, ...]:
    """Return new events that can be exported."""
    events = []
    for _ in range(num_events):
        events.append(runtime.create_event())
        undo.callback(runtime.destroy_event, events[-1])
    return tuple(events)


def open_events(runtime: CudaRuntime, export: PoolExport, undo: ExitStack) -> tuple[int, ...]:
    """Open the ring, and return its events by slot."""
    events: list[int] = []
    for handle in export.event_handles:
        try:
            event = runtime.open_event(handle)
        except (GpuFatalError, GpuMemoryError):
            raise
        except CudaCallError as error:
            # The driver says 205 then, which of memory means another thing.
            raise PoolMappingError(
                fault=MappingFault.EVENTS,
                message=f"the pool's event {len(events)} does not open (CUDA error "
                f"{error.status}), as where the daemons do not share /dev/shm or run as two users",
            ) from error
        undo.callback(runtime.destroy_event, event)
        events.append(event)
    return tuple(events)
