"""prefilld's pool and control page as decoded sees them: read-only, proved, closed exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.refusals import (
    descriptors_lost,
    foreign_backend,
    foreign_gpu,
    too_little_memory,
    too_slow,
    unmappable,
)
from protocol.descriptors import close_all
from shared.daemon.devices import CPU
from shared.kv.control_page import ControlPageView
from shared.kv.cuda_foreign import naming
from shared.kv.cuda_ipc import CudaIpcMapping, PoolExport
from shared.kv.errors import (
    CudaCallError,
    GpuFatalError,
    GpuMemoryError,
    LayoutError,
    MappingFault,
    PoolInUseError,
    PoolMappingError,
    UnknownEventError,
)
from shared.kv.memfd import MemfdMapping
from shared.kv.nvml import is_foreign, is_nvlink
from shared.kv.path_kind import FLOORS_GB_S, PathKind, path_kind
from shared.kv.pool import drop_views
from shared.kv.proof import measure_bandwidth, read_digest

if TYPE_CHECKING:
    from torch import Tensor

    from decoded.lease_effects import BlockCopy
    from protocol.messages import Map, Refuse
    from shared.daemon.devices import Device
    from shared.kv.layout import KVLayout


class PeerPool:
    """A mapped pool with its control page.

    Args:
        message: What MAP said of it.
        fds: The descriptors that came along, the control page's last; they stay the caller's.
        layout: What this daemon's own blocks look like; the peer's must look the same.
        device: Where this daemon computes.
        peer_device: UUID of prefilld's GPU, or `cpu`.

    Raises:
        PoolMappingError: A descriptor or a handle is not what MAP says.
        LayoutError: MAP announces a pool that cannot be.
        GpuMemoryError: This daemon's GPU has no room for the mapping, or to prove it.
        CudaCallError: CUDA failed, or the GPU is lost.

    Reads the proof and measures the path, which takes milliseconds; on the engine thread.
    """

    def __init__(
        self,
        message: Map,
        fds: list[int],
        layout: KVLayout,
        device: Device,
        *,
        peer_device: str = CPU,
    ) -> None:
        self.is_on_same_device = device.name == peer_device
        """Both daemons compute on one device."""
        self.layout = layout.with_num_blocks(message.num_blocks)
        with naming("mapping prefilld's pool"):
            self._pool = _open(message, fds, self.layout, device)
        try:
            self._page = ControlPageView.open(fds[-1], message.control_slots)
            with naming("reading prefilld's pool"):
                self.digest = read_digest(self._pool, message.proof_bytes)
                self.bandwidth_gb_s = measure_bandwidth(self._pool)
        except BaseException as error:
            drop_views(error)
            self._pool.close()
            raise

    @property
    def num_slots(self) -> int:
        """Slots on the control page."""
        return self._page.num_slots

    @property
    def kv(self) -> Tensor:
        """The pool's tensor; read-only."""
        return self._pool.kv

    def is_valid(self, copy: BlockCopy) -> bool:
        """Whether prefilld has not taken the lease of this copy back."""
        return self.stands(copy.slot, copy.generation)

    def stands(self, slot: int, generation: int) -> bool:
        """Whether prefilld has not taken back the lease of that generation."""
        return self._page.read(slot) == generation

    def first_token(self, copy: BlockCopy) -> int | None:
        """Return the first token of the answer to a copy's prompt, once prefilld knows it."""
        return self._page.first_token(copy.slot, copy.generation)

    def is_written(self, event: int | None) -> bool:
        """Whether what a CHUNK with this event named is written.

        Raises:
            UnknownEventError: The pool has no such event; on a memfd, none at all.
        """
        if event is None:
            return True
        if isinstance(self._pool, CudaIpcMapping):
            return self._pool.is_done(event)
        raise UnknownEventError(slot=event, num_events=0)

    @property
    def num_events(self) -> int:
        """Length of the ring that CHUNKs name events of."""
        return self._pool.num_events if isinstance(self._pool, CudaIpcMapping) else 0

    def close(self) -> bool:
        """Unmap; False where a tensor still looks into the pool, and then it is to be repeated."""
        try:
            self._pool.close()
        except PoolInUseError:
            return False
        self._page.close()
        return True


def map_pool(
    message: Map,
    fds: list[int] | None,
    *,
    layout: KVLayout,
    device: Device,
    peer_device: str,
    peer_driver: str,
    min_bandwidth_gb_s: float | None,
) -> PeerPool | Refuse:
    """Map what MAP describes, or return why it cannot be; its descriptors are closed either way.

    Args:
        message: What prefilld says of its pool.
        fds: The descriptors that came along; None where they were lost.
        layout: What this daemon's own blocks look like.
        device: Where this daemon computes.
        peer_device: UUID of prefilld's GPU, or `cpu`.
        peer_driver: The newest CUDA that prefilld's driver speaks; empty on the CPU.
        min_bandwidth_gb_s: A slower path is refused; None goes by the kind of path.

    Raises:
        GpuFatalError: This daemon's GPU is lost.
    """
    if fds is None:
        return descriptors_lost()
    try:
        if bool(message.pool_handle) != (device.index is not None):
            return foreign_backend()
        if device.index is not None and is_foreign(device.name, peer_device):
            return foreign_gpu(ours=device.name, theirs=peer_device)
        pool = PeerPool(message, fds, layout, device, peer_device=peer_device)
    except PoolMappingError as error:
        drivers = device.driver, peer_driver
        return unmappable(str(error), error.fault, drivers=drivers)
    except LayoutError as error:
        return unmappable(str(error))
    except GpuFatalError:
        raise
    except GpuMemoryError as error:
        return too_little_memory(str(error), gpu=device.name)
    except CudaCallError as error:
        return unmappable(str(error), MappingFault.MAP, drivers=(device.driver, peer_driver))
    finally:
        close_all(fds)
    floor_gb_s = min_bandwidth_gb_s
    if floor_gb_s is None:
        floor_gb_s = FLOORS_GB_S[_path_kind(device.name, peer_device)]
    if pool.bandwidth_gb_s < floor_gb_s:
        pool.close()
        return too_slow(floor_gb_s, pool.bandwidth_gb_s)
    return pool


def _path_kind(ours: str, theirs: str) -> PathKind:
    linked = is_nvlink(ours, theirs) if CPU not in (ours, theirs) and ours != theirs else None
    return path_kind(ours=ours, theirs=theirs, is_nvlink=linked)


def _open(
    message: Map, fds: list[int], layout: KVLayout, device: Device
) -> MemfdMapping | CudaIpcMapping:
    if device.index is None:
        return MemfdMapping.open(fds[0], layout, message.pool_bytes)
    export = PoolExport(
        handle=message.pool_handle,
        offset=message.offset,
        num_bytes=message.pool_bytes,
        event_handles=tuple(message.event_handles),
    )
    return CudaIpcMapping.open(export, layout, device=device.index)
