"""prefilld put together: what it is made of, how it comes up, what it answers, how it ends."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from prefilld.assembly import Parts, assemble
from prefilld.clients import Client
from prefilld.metrics import PrefillMetrics
from protocol import messages as wire
from protocol.errors import RequestError
from protocol.limits import EPOCH_BYTES
from shared.clock import NS_PER_S
from shared.daemon.garbage import freeze_startup_objects
from shared.daemon.listening import Door
from shared.daemon.quiet import QuietTime
from shared.daemon.watched import watched
from shared.engine.thread import EngineThread
from shared.service.frame import DaemonState, Service

if TYPE_CHECKING:
    import socket

    from protocol.closing import CloseReason
    from protocol.listener import Listener

SWEEP_S = 0.1
"""Pause between two looks at deadlines; all of them are seconds."""

ENGINE_GRACE_S = 1.0
"""For the step that runs when the daemon ends; a model that is still loading is not waited for."""

HEAR_OUT_S = 1.0
"""How long a daemon that drains waits for the request of a client that it has let in; clients
send theirs as soon as they are connected."""

MAX_CLIENTS = 4096
"""Connections at once; each takes a descriptor, and the usual limit of a service is higher."""


async def run(service: Service, listener: Listener) -> None:
    """Run prefilld until it was told to stop and has finished what it had begun."""
    engine = EngineThread(num_threads=service.config.prefilld.threads)
    watching = watched(
        service.metrics, name=service.name, resolved=service.resolved, log=service.log
    )
    with listener:  # where nobody may watch as configured, there is no app to close it
        async with watching as service.tracer:
            app = Prefilld(service, engine, listener)
            try:
                await app.serve()
            finally:
                app.close()
                await engine.stop(grace_s=ENGINE_GRACE_S)


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
        self._parts: Parts | None = None
        """Once the model is loaded."""
        self._listener = listener
        self._is_hearing_out = listener.is_inherited
        """Whether requests of clients that were let in are taken, though the daemon drains."""
        self._door = Door(listener, self._on_connection, loop=self._loop, log=service.log)
        service.attend(
            engine,
            num_requests=self._num_requests,
            is_peer_starting=lambda: self._parts is not None and self._parts.link.is_answered,
        )

    async def serve(self) -> None:
        """Load, then serve until the daemon drains and nothing is left."""
        parts = self._parts = await assemble(
            self._service,
            self._engine,
            self._epoch,
            self._metrics,
            on_link_change=self._on_link_change,
            turns_away=self._turns_away,
        )
        freeze_startup_objects()
        parts.overview.declare(self._service.metrics)
        self._service.spawn(parts.serving.prefill.run(), name="prefill")
        self._service.spawn(parts.link.keep(), name="link")
        self._service.spawn(self._sweep(parts), name="sweep")
        self._loaded.set()
        self._service.set_state(DaemonState.WAITING)
        await self._service.draining.wait()
        if self._listener.is_inherited:  # clients that come now wait for our successor
            self._door.shut()
            await self._hear_out()
        # With our own socket they are told `draining`; without one they would think us dead.
        while not parts.is_idle:  # noqa: ASYNC110  idleness has no single event
            await asyncio.sleep(SWEEP_S)

    async def _hear_out(self) -> None:
        """Serve who was let in and has not asked yet: nobody else can answer them any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEAR_OUT_S):
                while any(  # noqa: ASYNC110  as below
                    client.is_open and not client.has_asked for client in self._clients
                ):
                    await asyncio.sleep(SWEEP_S)
        await asyncio.sleep(SWEEP_S)  # whoever asked last is being judged by then
        self._is_hearing_out = False

    def _turns_away(self) -> bool:
        """Whether a request that comes now is one for our successor."""
        return self._service.draining.is_set() and not self._is_hearing_out

    def close(self) -> None:
        """End everything at once: what is left is told that the daemon stops."""
        self._door.shut()
        is_told = self._service.draining.is_set()
        stopping = RequestError(
            "draining" if is_told else "internal", "prefilld is shutting down", retryable=True
        )
        if self._parts is not None:
            self._parts.link.close()  # first: what decoded did not adopt is ours to end
            self._parts.serving.end_all(stopping)
            self._parts.reception.close()
            if self._parts.host.template is not None:
                self._parts.host.template.close()
        for client in tuple(self._clients):  # those that have not asked yet, or are being judged
            if client.is_open:
                client.finish(wire.Error(code=stopping.code, message=str(stopping), retryable=True))
            else:
                client.close()

    def _num_requests(self) -> int:
        return 0 if self._parts is None else self._parts.serving.num_requests

    def _on_link_change(self) -> None:
        is_open = self._parts is not None and self._parts.link.is_open
        if self._parts is not None and not is_open:
            self._parts.serving.end_poisoned()
        self._service.set_state(DaemonState.SERVING if is_open else DaemonState.WAITING)

    async def _sweep(self, parts: Parts) -> None:
        """Look at every deadline, for ever."""
        quiet = QuietTime()
        while True:
            await asyncio.sleep(SWEEP_S)
            stall_s = self._service.config.limits.client_stall_timeout_s
            now_s = self._service.clock.monotonic_ns() / NS_PER_S
            parts.link.tick()
            parts.desk.lending.expire(now_s)
            parts.desk.pump()
            parts.serving.expire(now_s)
            for client in tuple(self._clients):
                if client.is_stalled(now_s, stall_s):
                    self._service.log.warning("client.stalled", timeout_s=stall_s)
                    client.close()
            if quiet.is_over(is_idle=parts.is_idle, now_s=now_s):
                parts.holds.check_integrity()

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
        assert self._parts is not None
        if isinstance(message, wire.Generate):
            await self._parts.reception.generate(client, message)
        else:
            await self._parts.reception.check(client, message)

    def on_cancel(self, client: Client) -> None:
        """End the client's answer."""
        if self._parts is not None:
            self._parts.serving.cancel(client)

    def on_flushed(self, client: Client) -> None:
        """Hand over what only waited for its client."""
        if self._parts is not None:
            self._parts.desk.pump()

    def on_handed_over(self, client: Client) -> None:
        """Forget a connection that is decoded's."""
        self._clients.discard(client)

    def on_gone(self, client: Client, reason: CloseReason) -> None:
        """A closed connection is a cancel."""
        self._clients.discard(client)
        if reason.error is not None and (code := getattr(reason.error, "code", None)):
            self._metrics.protocol_errors.labels(code).inc()
            self._service.log.warning("client.refused", code=code, reason=str(reason.error))
        if self._parts is not None:
            self._parts.serving.cancel(client)

    # --- status ------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the tree that STATUS tells; `prefilld/README.md` explains it."""
        status = self._service.status() | {
            "epoch": self._epoch.hex(),
            "decoded_socket": self._service.config.decoded.socket,
            "device": self._service.config.prefilld.device,
            "model": self._service.config.model.path,
        }
        parts = self._parts
        if parts is None:
            return status | dict.fromkeys(
                ("fingerprint", "vocab_size", "pool", "prefix_cache", "queue", "link", "requests")
            )
        told = {
            "device": parts.device.name,
            "fingerprint": parts.host.fingerprint,
            "vocab_size": parts.host.spec.vocab_size,
        }
        return status | told | parts.overview.status()
