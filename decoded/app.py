"""decoded put together: what it is made of, how it comes up, who may knock, how it ends."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from decoded.access import choose_access
from decoded.admittance import judge_hello
from decoded.adoption import AdoptionDesk
from decoded.assembly import Parts, assemble
from decoded.link import LinkSession
from decoded.link_pool import LinkPool
from decoded.metrics import DecodeMetrics
from decoded.refusals import link_busy
from decoded.visitor import Visitor
from protocol import messages as wire
from shared.clock import NS_PER_S
from shared.daemon.garbage import freeze_startup_objects
from shared.daemon.instance import this_instance
from shared.daemon.listening import Door
from shared.daemon.quiet import QuietTime
from shared.daemon.watched import watched
from shared.engine.thread import EngineThread
from shared.service.frame import DaemonState, Service

if TYPE_CHECKING:
    import socket

    from protocol.listener import Listener

SWEEP_S = 0.1
"""Pause between two looks at deadlines; all of them are seconds."""

ENGINE_GRACE_S = 1.0
"""For the step that runs when the daemon ends; a model that is still loading is not waited for."""


async def run(service: Service, listener: Listener) -> None:
    """Run decoded until it was told to stop and has finished what it had adopted."""
    engine = EngineThread(num_threads=service.config.decoded.threads)
    watching = watched(
        service.metrics, name=service.name, resolved=service.resolved, log=service.log
    )
    with listener:  # where nobody may watch as configured, there is no app to close it
        async with watching as service.tracer:
            app = Decoded(service, engine, listener)
            try:
                await app.serve()
            finally:
                app.close()
                await engine.stop(grace_s=ENGINE_GRACE_S)


class Decoded:
    """The daemon.

    Args:
        service: The frame that it runs in.
        engine: Its engine thread.
        listener: Its socket, bound before anything is loaded; prefilld's HELLO waits.
    """

    def __init__(self, service: Service, engine: EngineThread, listener: Listener) -> None:
        self._service, self._engine = service, engine
        self._metrics = DecodeMetrics(service.metrics)
        self._loop = asyncio.get_running_loop()
        self._instance = this_instance()
        self._last_peer: wire.Instance | None = None
        """Whose link was taken last."""
        self._visitors: set[Visitor] = set()
        self._loaded = asyncio.Event()
        self._parts: Parts | None = None
        """Once the model is loaded."""
        self._door = Door(listener, self._on_connection, loop=self._loop, log=service.log)
        service.attend(engine, num_requests=self._num_requests)

    async def serve(self) -> None:
        """Load, then serve until the daemon drains and nothing is left."""
        parts = self._parts = await assemble(self._service, self._engine, self._metrics)
        freeze_startup_objects()
        self._service.spawn(self._sweep(parts), name="sweep")
        self._service.set_state(DaemonState.WAITING)
        self._loaded.set()
        await self._service.draining.wait()
        for session in parts.desk.links.sessions:
            if session.is_open:
                session.send(wire.Drain())
        while not parts.is_idle:  # noqa: ASYNC110  idleness has no single event
            await asyncio.sleep(SWEEP_S)

    def close(self) -> None:
        """End everything at once: what is left is told that the daemon stops."""
        self._door.shut()
        if self._parts is not None:
            is_told = self._service.draining.is_set()
            code = "draining" if is_told else "internal"
            for sequence in self._parts.book.living:
                self._parts.book.fail(sequence, code, "decoded is shutting down")
            for session in self._parts.desk.links.sessions:
                session.leave()
        for visitor in list(self._visitors):
            visitor.close()

    async def _sweep(self, parts: Parts) -> None:
        """Look at every deadline, for ever."""
        quiet = QuietTime()
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._service.clock.monotonic_ns() / NS_PER_S
            parts.book.close_stalled(now_s)
            parts.desk.tick()
            for visitor in tuple(self._visitors):
                if visitor.is_stalled(now_s, self._service.config.limits.client_stall_timeout_s):
                    visitor.close()
            if quiet.is_over(is_idle=parts.is_idle, now_s=now_s):
                for books in filter(None, (parts.allocator, parts.arena)):
                    books.check_integrity()
            has_link = any(session.is_open for session in parts.desk.links.sessions)
            self._service.set_state(DaemonState.SERVING if has_link else DaemonState.WAITING)

    def _num_requests(self) -> int:
        return 0 if self._parts is None else len(self._parts.book.living)

    # --- who knocks --------------------------------------------------------------------------

    def _on_connection(self, sock: socket.socket) -> None:
        self._visitors.add(
            Visitor(
                sock,
                loop=self._loop,
                handler=self,
                now_s=self._service.clock.monotonic_ns() / NS_PER_S,
            )
        )

    def on_status(self, visitor: Visitor) -> None:
        """Tell a client how we are."""
        visitor.finish(wire.Status(status=self.status()))

    def on_metrics(self, visitor: Visitor) -> None:
        """Tell a client our metrics."""
        visitor.finish(wire.Metrics(text=self._service.metrics.exposition()))

    def on_hello(self, visitor: Visitor, hello: wire.Hello) -> None:
        """Judge a link once there is a model to judge it by."""
        self._service.spawn(self._greet(visitor, hello), name="hello")

    def on_gone(self, visitor: Visitor, code: str | None) -> None:
        """Forget a connection; `code` says what rule its peer broke."""
        self._visitors.discard(visitor)
        if code is not None:
            self._metrics.protocol_errors.labels(code).inc()
            self._service.log.warning("visitor.refused", code=code)

    async def _greet(self, visitor: Visitor, hello: wire.Hello) -> None:
        await self._loaded.wait()
        assert self._parts is not None
        if not visitor.socket.is_open:
            return  # it gave up while the model was loading
        parts, credentials = self._parts, visitor.credentials
        refusal = judge_hello(
            hello,
            instance=self._instance,
            uid=credentials.uid,
            allowed_uids=self._allowed_uids(),
            fields=parts.host.fields,
            backend="memfd" if parts.device.index is None else "cuda",
            device=parts.device.name,
        ) or self._refuse_second(parts.desk)
        if refusal is not None:
            self._metrics.links_refused.labels(refusal.code).inc()
            self._service.log.warning(
                "link.refused",
                code=refusal.code,
                field=refusal.field,
                ours=refusal.ours,
                theirs=refusal.theirs,
            )
            visitor.finish(refusal)
            return
        access = choose_access(
            self._service.config.pool.access, ours=parts.device.name, theirs=hello.device
        )
        session = LinkSession(
            service=self._service,
            host=parts.host,
            pool=LinkPool(
                service=self._service,
                engine=self._engine,
                host=parts.host,
                device=parts.device,
                hello=hello,
                access=access,
                set_peer=parts.turns.set_peer,
            ),
            socket=visitor.socket,
            hello=hello,
            pid=credentials.pid,
            intake=parts.desk.new_intake(is_direct=access.way == "direct"),
            handler=parts.desk,
            loop=self._loop,
        )
        held = parts.desk.links.held_leases(hello.epoch, parts.desk.in_place)
        parts.desk.links.add(session)
        visitor.become(session)
        session.welcome(self._instance, held=held, pool_blocks=parts.host.layout.num_blocks - 1)
        self._metrics.links.inc()
        if self._last_peer not in (None, hello.instance):
            self._metrics.peer_restarts.inc()
        self._last_peer = hello.instance

    def _refuse_second(self, desk: AdoptionDesk) -> wire.Refuse | None:
        """Keep one link at a time: a living one refuses others, a dead one gives way."""
        for session in desk.links.sessions:
            if session.is_lost:
                continue
            if not session.is_peer_gone:
                return link_busy(pid=session.pid)
            session.give_way()
        return None

    def _allowed_uids(self) -> set[int]:
        if self._service.config.pool.backend == "cuda":
            return {os.geteuid()}  # CUDA's events do not open for another user, root included
        link_uid = self._service.config.decoded.link_uid
        return {os.geteuid(), 0} | ({link_uid} if link_uid is not None else set())

    # --- status ------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the tree that STATUS tells; `decoded/README.md` explains it."""
        status = self._service.status() | {
            "device": self._service.config.decoded.device,
            "model": self._service.config.model.path,
        }
        parts = self._parts
        if parts is None:
            unknown = ("fingerprint", "epoch", "pool", "sequences", "swap", "slots")
            return status | dict.fromkeys((*unknown, "link", "requests"))
        told = {"device": parts.device.name, "fingerprint": parts.host.fingerprint}
        return status | told | parts.overview.status()
