"""prefilld's end of the link: connects for ever, keeps watch over decoded, tells when it is gone.

    connect ──► hand-shake ──► open ──► lost
       ▲            │ refused            │
       └── pause ◄──┴────────────────────┘

A link is lost only after its queue was read to the end, so an ADOPT that decoded sent before it
died still counts.  Until its process is proved gone, blocks it may be reading stay in quarantine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prefilld.handshake import Exported, Handshake
from prefilld.lost_peers import LostPeers
from prefilld.reconnection import keep_connected
from protocol import messages as wire
from protocol.closing import CloseKind, CloseReason
from protocol.connection import Connection
from protocol.sockets import MessageSocket
from protocol.states import Role
from protocol.unix import connect_unix, peer_credentials
from shared.clock import NS_PER_S
from shared.config.devices import expects_direct
from shared.daemon.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.casualties import Casualties
    from prefilld.handoff import HandoffDesk
    from prefilld.metrics import PrefillMetrics
    from shared.service.frame import Service


class PrefillLink:
    """The link, whatever its state.

    Args:
        service: Configuration, clock, log.
        exported: What decoded is to map.
        desk: Who hands requests over through the link.
        casualties: Told when decoded died, and what it had.
        on_change: Called when the link opened or was lost.
    """

    def __init__(
        self,
        *,
        service: Service,
        exported: Exported,
        desk: HandoffDesk,
        casualties: Casualties,
        metrics: PrefillMetrics,
        on_change: Callable[[], None],
    ) -> None:
        self._service, self._exported = service, exported
        self._desk, self._casualties = desk, casualties
        self._metrics, self._on_change = metrics, on_change
        self._loop = asyncio.get_running_loop()
        self._state = "connecting"
        self._socket: MessageSocket | None = None
        self._handshake: Handshake | None = None
        """While the link is not open."""
        self._ended = asyncio.Event()
        self._pulse: Pulse | None = None
        """While it is."""
        self._peers = LostPeers(loop=self._loop, on_gone=self._proved_gone)
        self._welcome: wire.Welcome | None = None
        self._bandwidth_gb_s = 0.0
        self._is_parting = False
        """One side said BYE: the end of the link is no fault."""
        self._is_announced = False
        """Decoded said that it will end (DRAIN), or we end it: nobody died."""

    # --- what others may know ----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be handed over."""
        return self._state == "open"

    @property
    def is_answered(self) -> bool:
        """Whether decoded is there: it took the connection, and may still be loading."""
        return self._state in {"handshake", "open"}

    @property
    def peer_pool_blocks(self) -> int | None:
        """Blocks of decoded's pool that sequences may have; None before decoded ever told."""
        return None if self._welcome is None else self._welcome.pool_blocks

    @property
    def is_direct(self) -> bool:
        """Whether decoded reads whole blocks in place; what is configured before it ever told."""
        if self._welcome is None:
            return expects_direct(self._service.config)
        return self._welcome.access == "direct"

    def status(self) -> dict[str, object]:
        """Return what STATUS tells of the link."""
        welcome = self._welcome if self.is_open else None
        return {
            "state": self._state,
            "peer_pid": None if welcome is None else welcome.instance.pid,
            "access": None if welcome is None else welcome.access,
            "bandwidth_gb_s": None if welcome is None else round(self._bandwidth_gb_s, 3),
            "rtt_us": None if self._pulse is None else self._pulse.rtt_us,
        }

    # --- life --------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Connect, and connect again, for ever."""

        def on_pause() -> None:
            self._state = "connecting"

        await keep_connected(self._one_session, on_pause=on_pause, log=self._service.log)

    def tick(self) -> None:
        """Ask whether decoded lives; to be called several times a ping interval."""
        if self._pulse is None or self._socket is None:
            return
        timeout_s = self._service.config.link.ping_timeout_s
        sent_ns = self._desk.lending.oldest_sent_ns
        if sent_ns is not None and self._now_s() - sent_ns / NS_PER_S >= timeout_s:
            # It answers PING but not HANDOFF: its clients wait for nobody.
            self._service.log.error("link.unanswering", timeout_s=timeout_s)
            self._socket.shutdown_read_and_drain()
            return
        self._pulse.tick()

    def close(self) -> None:
        """Say BYE and close; the desk hears that the link is lost."""
        if self._socket is not None and self._socket.is_open:
            if self.is_open:
                self._is_parting = self._is_announced = True
                self._socket.send(wire.Bye())
            self._socket.shutdown_read_and_drain()
        self._peers.close()

    async def _one_session(self) -> None:
        """Connect, prove, serve; return when an open link was lost."""
        sock = connect_unix(self._service.config.decoded.socket)
        self._state = "handshake"
        link = MessageSocket(sock, Connection(Role.PREFILLD_LINK), loop=self._loop)
        handshake = Handshake(link, self._exported)
        self._socket, self._handshake = link, handshake
        self._ended.clear()
        pid = peer_credentials(sock).pid
        link.start(self._on_message, self._on_closed)
        try:
            async with asyncio.timeout(self._service.config.link.handshake_timeout_s):
                welcome = await handshake.greet()
                self._peers.found(pid, welcome.instance.start_time)
                mapped = await handshake.prove()
        except BaseException:
            if link.is_open:
                link.close_when_flushed()
            raise
        if not link.is_open:  # it ended right behind MAPPED, or decoded said BYE
            raise ConnectionError("decoded left as soon as it had mapped the pool")
        self._open(link, welcome, mapped)
        for left_over in handshake.left_over():
            if isinstance(left_over, wire.Message):
                self._dispatch(left_over)
        await self._ended.wait()

    def _open(self, link: MessageSocket, welcome: wire.Welcome, mapped: wire.Mapped) -> None:
        self._metrics.link_opened(before=self._welcome, now=welcome)
        self._state, self._handshake = "open", None
        self._is_parting = self._is_announced = False
        self._welcome, self._bandwidth_gb_s = welcome, mapped.bandwidth_gb_s
        self._pulse = Pulse(
            link,
            config=self._service.config.link,
            clock=self._service.clock,
            log=self._service.log,
        )
        self._service.log.info(
            "link.opened",
            peer_pid=welcome.instance.pid,
            access=welcome.access,
            bandwidth_gb_s=round(mapped.bandwidth_gb_s, 3),
            num_held=len(welcome.held),
        )
        self._casualties.peer_found()
        self._pulse.ask()  # for the first round trip
        self._desk.link_opened(
            link,
            welcome.held,
            is_direct=self.is_direct,
            pool_blocks=welcome.pool_blocks,
        )
        self._take_credits(mapped.credits)
        self._on_change()
        self._desk.pump()

    # --- messages ----------------------------------------------------------------------------

    def _on_message(self, message: wire.Message, _fds: list[int] | None) -> None:
        if self._pulse is not None:
            self._pulse.heard()
        if isinstance(message, wire.Bye):
            self._is_parting = True
            # Nothing follows it, and nothing may be sent any more.
            if self._socket is not None:
                self._socket.close()
        elif self._handshake is not None:
            self._handshake.receive(message)
        else:
            self._dispatch(message)

    def _dispatch(self, message: wire.Message) -> None:
        room: wire.Credits | None = getattr(message, "credits", None)
        if room is not None and not self._take_credits(room):
            return
        match message:
            case wire.Adopt(lease=lease_id):
                self._desk.lending.on_adopt(lease_id)
            case wire.Release(lease=lease_id):
                self._desk.lending.on_release(lease_id)
            case wire.NoChunk(lease=lease_id):
                self._desk.lending.on_nochunk(lease_id)
            case wire.Reject(lease=lease_id, code=code, message=text):
                self._desk.lending.on_reject(lease_id, code, text)
            case wire.Ping(sent_ns=sent_ns) if self._socket is not None:
                self._socket.send(wire.Pong(sent_ns=sent_ns))
            case wire.Pong() if self._pulse is not None:
                self._pulse.answered(message)
            case wire.Drain():
                self._service.log.info("link.draining")
                self._is_announced = True
                self._desk.peer_drains()
            case wire.Refuse(code=code, message=text):
                self._service.log.error("link.refused", code=code, reason=text)
            case _:
                pass  # CREDIT, which has been taken above
        self._desk.pump()

    def _take_credits(self, room: wire.Credits) -> bool:
        """Take decoded's word; False where it contradicts itself, and then the link is ended."""
        try:
            self._desk.update_credits(room)
        except ValueError as error:
            self._metrics.protocol_errors.labels("invalid-message").inc()
            self._service.log.warning("link.refused", code="invalid-message", reason=str(error))
            if self._socket is not None:
                self._socket.close()
            return False
        return True

    # --- the end -----------------------------------------------------------------------------

    def _on_closed(self, reason: CloseReason) -> None:
        if reason.error is not None:
            code = getattr(reason.error, "code", type(reason.error).__name__)
            self._metrics.protocol_errors.labels(code).inc()
        if self._handshake is not None:
            self._handshake.ended(reason)
        else:
            self._lost(reason)

    def _lost(self, reason: CloseReason) -> None:
        """The queue was read to its end: decide what was adopted, and what comes back."""
        self._state, self._pulse = "lost", None
        is_gone = self._peers.lost()
        self._metrics.links_lost.inc()
        if self._is_parting:
            self._service.log.info("link.closed", peer_is_gone=is_gone)
        else:
            self._service.log.warning(
                "link.lost",
                reason=reason.kind.value,
                error=None if reason.error is None else str(reason.error),
                peer_is_gone=is_gone,
            )
        self._casualties.peer_lost(request.id for request in self._desk.lending.requests)
        if self._is_announced:
            self._casualties.peer_left()
        elif self._is_parting or reason.kind is CloseKind.GONE:  # BYE without DRAIN is a failure
            self._casualties.peer_died()
        self._desk.link_lost(peer_is_gone=is_gone, grace_s=self._service.config.link.quarantine_s)
        self._ended.set()
        self._on_change()

    def _proved_gone(self, num_doubted: int) -> None:
        """End the quarantine, unless another lost peer may still be reading."""
        self._service.log.info("link.peer-gone")
        if not self.is_open:  # else its successor has the streams by now
            self._casualties.peer_died()
        if num_doubted == 0:
            self._desk.lending.peer_gone()
        self._on_change()

    def _now_s(self) -> float:
        return self._service.clock.monotonic_ns() / NS_PER_S
