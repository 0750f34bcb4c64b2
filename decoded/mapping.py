"""prefilld's pool and control page as decoded sees them: read-only, proved, closed exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.admittance import descriptors_lost, foreign_backend, too_slow, unmappable
from protocol.descriptors import close_all
from shared.kv.control_page import ControlPageView
from shared.kv.errors import LayoutError, PoolInUseError, PoolMappingError
from shared.kv.memfd import MemfdMapping
from shared.kv.proof import measure_bandwidth, read_digest

if TYPE_CHECKING:
    from torch import Tensor

    from decoded.lease_effects import BlockCopy
    from protocol.messages import Map, Refuse
    from shared.kv.layout import KVLayout


class PeerPool:
    """A mapped pool with its control page.

    Args:
        message: What MAP said of it.
        fds: The descriptors of pool and control page; they stay the caller's to close.
        layout: What this daemon's own blocks look like; the peer's must look the same.

    Raises:
        PoolMappingError: A descriptor is not what MAP says.
        LayoutError: MAP announces a pool that cannot be.

    Reads the proof and measures the path, which takes milliseconds; on the engine thread.
    """

    def __init__(self, message: Map, fds: list[int], layout: KVLayout) -> None:
        self.layout = layout.with_num_blocks(message.num_blocks)
        self._pool = MemfdMapping.open(fds[0], self.layout, message.pool_bytes)
        try:
            self._page = ControlPageView.open(fds[1], message.control_slots)
            self.digest = read_digest(self._pool, message.proof_bytes)
            self.bandwidth_gb_s = measure_bandwidth(self._pool)
        except BaseException:
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
        return self._page.read(copy.slot) == copy.generation

    def is_written(self, event: int | None) -> bool:
        """Whether what a CHUNK with this event named is written; a memfd's blocks always are."""
        return event is None

    def close(self) -> bool:
        """Unmap; False where a tensor still looks into the pool, and then it is to be repeated."""
        try:
            self._pool.close()
        except PoolInUseError:
            return False
        self._page.close()
        return True


def map_pool(
    message: Map, fds: list[int] | None, *, layout: KVLayout, min_bandwidth_gb_s: float
) -> PeerPool | Refuse:
    """Map what MAP describes, or return why it cannot be; its descriptors are closed either way.

    Args:
        message: What prefilld says of its pool.
        fds: The descriptors that came along; None where they were lost.
        layout: What this daemon's own blocks look like.
        min_bandwidth_gb_s: A slower path is refused.
    """
    if fds is None:
        return descriptors_lost()
    try:
        if message.pool_handle:
            return foreign_backend()
        pool = PeerPool(message, fds, layout)
    except PoolMappingError as error:
        return unmappable(str(error), error.fault)
    except LayoutError as error:
        return unmappable(str(error))
    finally:
        close_all(fds)
    if pool.bandwidth_gb_s < min_bandwidth_gb_s:
        pool.close()
        return too_slow(min_bandwidth_gb_s, pool.bandwidth_gb_s)
    return pool
