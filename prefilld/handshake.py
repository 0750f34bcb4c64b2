"""The hand-shake as prefilld sees it: HELLO, WELCOME, MAP with descriptors, MAPPED, the proof."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from protocol import limits
from protocol import messages as wire
from protocol.errors import LinkRefusedError
from shared.kv.cuda_ipc import CudaIpcPool
from shared.kv.proof import pattern_bytes, write_pattern

if TYPE_CHECKING:
    from protocol.closing import CloseReason
    from protocol.sockets import MessageSocket
    from shared.daemon.devices import Device
    from shared.daemon.model_host import ModelHost
    from shared.engine.thread import EngineThread
    from shared.kv.control_page import ControlPage
    from shared.kv.memfd import MemfdPool

M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """What decoded is to map, and what it must agree with."""

    pool: MemfdPool | CudaIpcPool
    device: Device
    control_page: ControlPage
    epoch: bytes
    instance: wire.Instance
    host: ModelHost
    engine: EngineThread
    """The pool is written there and nowhere else, the pattern of the proof included."""

    @property
    def backend(self) -> str:
        """What the pool is made of, as HELLO names it."""
        return "cuda" if isinstance(self.pool, CudaIpcPool) else "memfd"

    def map_message(self, *, proof_bytes: int) -> tuple[wire.Map, tuple[int, ...]]:
        """Return MAP, and the new descriptors that are to ride along."""
        layout, page = self.pool.layout, self.control_page
        export = self.pool.export() if isinstance(self.pool, CudaIpcPool) else None
        message = wire.Map(
            pool_bytes=layout.pool_bytes,
            offset=0 if export is None else export.offset,
            num_blocks=layout.num_blocks,
            control_slots=page.num_slots,
            proof_bytes=proof_bytes,
            pool_handle=b"" if export is None else export.handle,
            event_handles=[] if export is None else list(export.event_handles),
        )
        if isinstance(self.pool, CudaIpcPool):
            return message, (page.export(),)
        return message, (self.pool.export(), page.export())


class Handshake:
    """One hand-shake over one connection.

    Args:
        link: The connection; who reads it calls `receive` and `ended`.
        exported: What to offer.
    """

    def __init__(self, link: MessageSocket, exported: Exported) -> None:
        self._link, self._exported = link, exported
        # The state tables bound how many messages can come before the link is open.
        self._inbox: asyncio.Queue[wire.Message | CloseReason] = asyncio.Queue()

    def receive(self, message: wire.Message) -> None:
        """Take a message that arrived before the link was open."""
        self._inbox.put_nowait(message)

    def ended(self, reason: CloseReason) -> None:
        """Take note that the connection ended."""
        self._inbox.put_nowait(reason)

    def left_over(self) -> list[wire.Message | CloseReason]:
        """Return what arrived behind MAPPED, oldest first."""
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    async def greet(self) -> wire.Welcome:
        """Say who we are.

        Raises:
            LinkRefusedError: decoded does not take the link; it says why.
            ConnectionError: The connection ended.
        """
        exported = self._exported
        self._link.send(
            wire.Hello(
                version=limits.VERSION,
                instance=exported.instance,
                epoch=exported.epoch,
                backend=exported.backend,
                device=exported.device.name,
                driver=exported.device.driver,
                fingerprint=exported.host.fingerprint,
                fields=exported.host.fields,
            )
        )
        return await self._expect(wire.Welcome)

    async def prove(self) -> wire.Mapped:
        """Let decoded map the pool, and hold what it read against what was written.

        Raises:
            LinkRefusedError: decoded cannot map the pool, or mapped another one.
            ConnectionError: The connection ended.
        """
        exported = self._exported
        pattern = secrets.token_bytes(pattern_bytes(exported.pool))
        digest = await exported.engine.run(write_pattern, exported.pool, pattern)
        message, descriptors = exported.map_message(proof_bytes=len(pattern))
        try:
            self._link.send(message, descriptors)
            await self._link.flush()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        mapped = await self._expect(wire.Mapped)
        if mapped.digest != digest:
            self._refuse_proof(digest.hex(), mapped.digest.hex())
        return mapped

    def _refuse_proof(self, ours: str, theirs: str) -> None:
        cure = "what decoded mapped is not this pool; restart both daemons"
        self._link.send(
            wire.Refuse(code="proof", field="digest", ours=ours, theirs=theirs, message=cure)
        )
        raise LinkRefusedError(reason="proof", field="digest", ours=ours, theirs=theirs, cure=cure)

    async def _expect(self, kind: type[M]) -> M:
        """Return the next message, which the state tables hold to `kind`, REFUSE or BYE."""
        message = await self._inbox.get()
        if isinstance(message, kind):
            return message
        if isinstance(message, wire.Refuse):
            # What decoded calls ours is theirs, seen from here.
            raise LinkRefusedError(
                reason=message.code,
                field=message.field,
                ours=message.theirs,
                theirs=message.ours,
                cure=message.message,
            )
        if isinstance(message, wire.Error):
            raise ConnectionError(f"decoded refuses to talk ({message.code}): {message.message}")
        if isinstance(message, wire.Message):
            raise ConnectionError("decoded is leaving")
        raise ConnectionError(f"the connection ended during the hand-shake: {message.kind.value}")
