"""prefilld put together: what it is made of, how it comes up, what it answers, how it ends."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from prefilld.admission import Bounds
from prefilld.clients import Client
from prefilld.handoff import HandoffDesk
from prefilld.handshake import Exported
from prefilld.link import PrefillLink
from prefilld.metrics import PrefillMetrics
from prefilld.serving import Serving
from protocol import messages as wire
from protocol.acceptor import Acceptor
from protocol.errors import RequestError
from protocol.limits import EPOCH_BYTES, MAX_CONTROL_SLOTS
from shared.clock import NS_PER_S
from shared.daemon.instance import this_instance
from shared.daemon.listening import open_listener
from shared.daemon.model_host import ModelHost, load_model_host
from shared.daemon.status import pool_status
from shared.engine.runner import ModelRunner
from shared.engine.thread import EngineThread
from shared.kv.allocator import BlockAllocator
from shared.kv.control_page import ControlPage
from shared.kv.leases import LeaseTable
from shared.kv.memfd import MemfdPool
from shared.service.frame import DaemonState, Service

if TYPE_CHECKING:
    import socket

    from protocol.closing import CloseReason
    from protocol.listener import Listener

SWEEP_S = 0.1
"""Pause between two looks at deadlines; all of them are seconds."""

MAX_CLIENTS = 4096
"""Connections at once; each takes a descriptor, and the usual limit of a service is higher."""


async def run(service: Service) -> None:
    """Run prefilld until it was told to stop and has finished what it had begun."""
    listener = open_listener(service.socket_path)
    engine = EngineThread(num_threads=service.config.prefilld.threads)
    app = Prefilld(service, engine, listener)
    try:
        await app.serve()
    finally:
        app.close()
        await engine.stop()


class Prefilld:
    """The daemon.

    Args:
        service: The frame that it runs in.
        engine: Its engine thread.
        listener: Its socket, bound before anything is loaded; clients that come early wait.
    """

    def __init__(self, service: Service, engine: EngineThread, listener: Listener) -> None:
        self._service, self._engine = service, engine
        self._metrics = PrefillMetrics(service.metrics)
        self._loop = asyncio.get_running_loop()
        self._clients: set[Client] = set()
        self._loaded = asyncio.Event()
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        self._host: ModelHost | None = None
        self._allocator: BlockAllocator | None = None
        self._pool: MemfdPool | None = None
        self._control_page: ControlPage | None = None
        self._serving: Serving | None = None
        self._desk: HandoffDesk | None = None
        self._link: PrefillLink | None = None
        self._listener = listener
        self._acceptor = Acceptor(
            listener.socket,
            self._on_connection,
            loop=self._loop,
            on_exhausted=lambda error: service.log.error("listener.exhausted", error=str(error)),
        )

    async def serve(self) -> None:
        """Load, then serve until the daemon drains."""
        await self._load()
        assert self._serving is not None
        assert self._link is not None
        self._service.spawn(self._serving.prefill_loop(), name="prefill")
        self._service.spawn(self._link.keep(), name="link")
        self._service.spawn(self._sweep(), name="sweep")
        self._loaded.set()
        self._service.set_state(DaemonState.WAITING)
        await self._service.draining.wait()
        self._stop_accepting()
        while not self._serving.is_idle:
            await asyncio.sleep(SWEEP_S)

    def close(self) -> None:
        """End everything at once: what is left is told that the daemon stops."""
        self._stop_accepting()
        stopping = RequestError("draining", "prefilld is shutting down", retryable=True)
        if self._serving is not None:
            self._serving.end_all(stopping)
            self._serving.close()
        for client in list(self._clients):
            if client.is_open and not client.has_asked:
                client.finish(wire.Error(code="draining", message=str(stopping), retryable=True))
        if self._link is not None:
            self._link.close()
        if self._host is not None and self._host.template is not None:
            self._host.template.close()

    def _stop_accepting(self) -> None:
        self._acceptor.stop()
        self._listener.close()

    async def _load(self) -> None:
        service, config = self._service, self._service.config
        host = await self._engine.run(load_model_host, config, num_blocks=config.pool.num_blocks)
        if host.template is not None:  # now, so that a template that is broken shows at the start
            await asyncio.to_thread(host.template.start)
        pool = await self._engine.run(MemfdPool.create, host.layout)
        runner = ModelRunner(host.model, pool.kv, host.layout)
        allocator = BlockAllocator(config.pool.num_blocks)
        # Every lease has at least one block, so slots can never run out before blocks do.
        num_slots = min(config.pool.num_blocks, MAX_CONTROL_SLOTS)
        control_page = ControlPage.create(num_slots)
        desk = HandoffDesk(
            epoch=self._epoch,
            block_size=host.layout.block_size,
            leases=LeaseTable(num_slots),
            allocator=allocator,
            control_page=control_page,
            clock=service.clock,
            log=service.log,
            metrics=self._metrics,
            on_blocks_freed=lambda: serving.wake(),
            on_adopted=lambda request: serving.adopted(request),
            on_rejected=lambda request, code, text: serving.rejected(request, code, text),
        )
        serving = Serving(
            service=service,
            host=host,
            runner=runner,
            engine=self._engine,
            allocator=allocator,
            desk=desk,
            metrics=self._metrics,
            bounds=self._bounds,
        )
        exported = Exported(
            pool=pool,
            control_page=control_page,
            epoch=self._epoch,
            instance=this_instance(),
            host=host,
            engine=self._engine,
        )
        self._link = PrefillLink(
            service=service,
            exported=exported,
            desk=desk,
            metrics=self._metrics,
            on_change=self._on_link_change,
        )
        self._host, self._pool, self._control_page = host, pool, control_page
        self._allocator, self._desk, self._serving = allocator, desk, serving
        service.log.info(
            "model.loaded",
            model=host.name,
            fingerprint=host.fingerprint,
            num_blocks=host.layout.num_blocks,
            pool_bytes=host.layout.pool_bytes,
        )

    def _bounds(self) -> Bounds:
        config = self._service.config
        peer_blocks = None if self._link is None else self._link.peer_pool_blocks
        return Bounds(  # block 0 of either pool is reserved
            prefill_blocks=config.pool.num_blocks - 1,
            decode_blocks=peer_blocks or config.decoded.num_blocks - 1,
            max_tokens_default=config.limits.max_tokens_default,
        )

    def _on_link_change(self) -> None:
        assert self._link is not None
        is_open = self._link.is_open
        self._service.set_state(DaemonState.SERVING if is_open else DaemonState.WAITING)

    async def _sweep(self) -> None:
        """Look at every deadline, for ever."""
        assert self._serving is not None
        assert self._desk is not None
        assert self._link is not None
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._service.clock.monotonic_ns() / NS_PER_S
            self._link.tick()
            self._desk.expire()
            self._serving.expire(now_s)
            stall_s = self._service.config.limits.client_stall_timeout_s
            for client in list(self._clients):
                if client.is_stalled(now_s, stall_s):
                    self._service.log.warning("client.stalled", timeout_s=stall_s)
                    client.close()
            if self._serving.is_idle and self._allocator is not None:
                self._allocator.check_integrity()

    # --- clients -----------------------------------------------------------------------------

    def _on_connection(self, sock: socket.socket) -> None:
        client = Client(
            sock,
            loop=self._loop,
            handler=self,
            max_request_bytes=self._service.config.limits.max_request_bytes,
            now_s=self._service.clock.monotonic_ns() / NS_PER_S,
        )
        self._clients.add(client)
        if len(self._clients) > MAX_CLIENTS:
            client.finish(
                wire.Error(
                    code="busy", message=f"{MAX_CLIENTS} clients are connected", retryable=True
                )
            )

    def on_request(self, client: Client, message: wire.Message) -> None:
        """Answer STATUS and METRICS at once; everything else once the model is loaded."""
        match message:
            case wire.StatusRequest():
                client.finish(wire.Status(status=self.status()))
            case wire.MetricsRequest():
                client.finish(wire.Metrics(text=self._service.metrics.exposition()))
            case wire.Generate() | wire.Check():
                self._service.spawn(self._when_loaded(client, message), name="request")

    async def _when_loaded(self, client: Client, message: wire.Generate | wire.Check) -> None:
        await self._loaded.wait()
        assert self._serving is not None
        if isinstance(message, wire.Generate):
            await self._serving.generate(client, message)
        else:
            await self._serving.check(client, message)

    def on_cancel(self, client: Client) -> None:
        """End the client's answer."""
        if self._serving is not None:
            self._serving.cancel(client)

    def on_flushed(self, client: Client) -> None:
        """Hand over what only waited for its client."""
        if self._desk is not None:
            self._desk.pump()

    def on_gone(self, client: Client, reason: CloseReason) -> None:
        """A closed connection is a cancel."""
        self._clients.discard(client)
        if reason.error is not None and (code := getattr(reason.error, "code", None)):
            self._metrics.protocol_errors.labels(code).inc()
            self._service.log.warning("client.refused", code=code, reason=str(reason.error))
        if self._serving is not None:
            self._serving.cancel(client)

    # --- status ------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the tree that STATUS tells; `prefilld/README.md` explains it."""
        host, allocator = self._host, self._allocator
        status = self._service.status() | {
            "epoch": self._epoch.hex(),
            "device": "cpu",
            "model": self._service.config.model.path,
        }
        if host is None or allocator is None or self._serving is None or self._link is None:
            return status
        return status | {
            "fingerprint": host.fingerprint,
            "pool": pool_status(allocator, host.layout),
            "queue": self._serving.queue_status(),
            "link": self._link.status(),
        }
