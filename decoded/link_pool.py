"""Prefilld's pool over one link's life: mapped once on the engine thread, and unmapped there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.mapping import PeerPool, map_pool
from decoded.refusals import too_little_memory
from shared.kv.errors import GpuMemoryError
from shared.kv.pool import drop_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from decoded.access import Access
    from protocol import messages as wire
    from shared.daemon.devices import Device
    from shared.daemon.model_host import ModelHost
    from shared.engine.thread import EngineThread
    from shared.service.frame import Service


class LinkPool:
    """The mapping of one link, whatever its state.

    Args:
        service: Configuration, and where work in the background runs.
        engine: The thread on which all of it happens.
        host: The model whose blocks the pool has.
        device: Where this daemon computes.
        hello: What prefilld said of itself.
        access: How the blocks are used.
        set_peer: Lets the engine read a pool in place, where access is direct; see `Turns`.
    """

    def __init__(
        self,
        *,
        service: Service,
        engine: EngineThread,
        host: ModelHost,
        device: Device,
        hello: wire.Hello,
        access: Access,
        set_peer: Callable[[Tensor | None], None],
    ) -> None:
        self._service, self._engine, self._set_peer = service, engine, set_peer
        self._host, self._device, self._hello = host, device, hello
        self.access = access
        self.mapped: PeerPool | None = None
        """The pool, from the moment it was mapped; also when it is unmapped by now."""
        self._is_mapping = self._is_unmapping = self._is_unmapped = False
        self._is_read_in_place = False

    @property
    def is_mapped(self) -> bool:
        """Whether the pool is mapped."""
        return self.mapped is not None and not self._is_unmapped

    async def map(self, message: wire.Map, fds: list[int] | None) -> PeerPool | wire.Refuse:
        """Map what MAP describes, or return why it cannot be; see `map_pool`."""
        self._is_mapping = True
        try:
            pool = await self._engine.run(
                map_pool,
                message,
                fds,
                layout=self._host.layout,
                device=self._device,
                peer_device=self._hello.device,
                peer_driver=self._hello.driver,
                min_bandwidth_gb_s=self._service.config.link.min_bandwidth_gb_s,
            )
        finally:
            self._is_mapping = False
        if isinstance(pool, PeerPool):
            self.mapped = pool
        return pool

    async def begin_direct(self) -> wire.Refuse | None:
        """Let the engine read the pool in place, or say why it cannot; no other one is mapped."""
        assert self.mapped is not None, "a pool is mapped before it is read"
        self._is_read_in_place = True  # by now: whoever unmaps stands behind this on the engine
        try:
            await self._engine.run(self._set_peer, self.mapped.kv)
        except GpuMemoryError as error:
            self._is_read_in_place = False
            drop_views(error)
            return too_little_memory(str(error), gpu=self._device.name)
        return None

    def unmap(self) -> bool:
        """Unmap the pool, which nobody reads; True when that is done.

        To be called again until then.
        """
        is_under_way = self._is_mapping or self._is_unmapping or self._engine.is_stopped
        if self._is_unmapped or is_under_way:
            return self._is_unmapped
        if self.mapped is None:
            self._is_unmapped = True
        else:
            self._is_unmapping = True
            self._service.spawn(self._unmap(self.mapped), name="unmap")
        return self._is_unmapped

    async def _unmap(self, pool: PeerPool) -> None:
        """Unmap on the engine thread, behind whatever it is doing."""
        try:
            if self._is_read_in_place:
                await self._engine.run(self._set_peer, None)
            self._is_unmapped = await self._engine.run(pool.close)
        finally:
            self._is_unmapping = False
