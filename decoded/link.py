"""One link as decoded sees it: answers HELLO, maps and proves the pool, passes messages on.

A session outlives its connection: what was adopted is still pulled from the mapping after prefilld
has died, and only then is the mapping closed.  So the link of a new epoch can be open while blocks
of an old one are still being read; each session has its own mapping and its own book of leases.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from decoded.admittance import check_chunk, check_handoff
from decoded.credits import is_outdated
from decoded.refusals import contradiction
from protocol import messages as wire
from protocol.descriptors import connection_among
from protocol.errors import InvalidMessageError
from shared.clock import NS_PER_S
from shared.daemon.peer_watch import PeerWatch
from shared.daemon.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from decoded.intake import Intake
    from decoded.link_handler import LinkHandler
    from decoded.link_pool import LinkPool
    from decoded.mapping import PeerPool
    from decoded.sequence import Sequence
    from protocol.closing import CloseReason
    from protocol.sockets import MessageSocket
    from shared.daemon.model_host import ModelHost
    from shared.service.frame import Service


UNMAP_POLL_S = 0.01
"""Pause between two looks whether an earlier link's pool is still read in place."""


class LinkSession:
    """A link from WELCOME until its last adopted block is copied.

    Args:
        socket: The connection, on which a HELLO that was not refused has just arrived.
        hello: That message.
        pid: The process at the other end, as seen from here.
        intake: This link's book of leases.
        pool: The mapping of prefilld's pool, to be.
    """

    def __init__(
        self,
        *,
        service: Service,
        host: ModelHost,
        pool: LinkPool,
        socket: MessageSocket,
        hello: wire.Hello,
        pid: int,
        intake: Intake[Sequence],
        handler: LinkHandler[LinkSession],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._service, self._host, self._pool = service, host, pool
        self._socket, self._handler = socket, handler
        self.intake = intake
        self.epoch = hello.epoch
        self.pid = pid
        self._watch = PeerWatch(pid=pid, start_time=hello.instance.start_time, loop=loop)
        self._pulse = Pulse(
            socket, config=service.config.link, clock=service.clock, log=service.log
        )
        self._state = "handshake"
        self._began_s = self._now_s()
        self._told: wire.Credits | None = None
        """In the last frame that tells them."""
        self._lost_s: float | None = None
        self._is_parting = False
        """One side said BYE: the end of the link is no fault."""

    # --- what others may know ----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can come and answers can go."""
        return self._state == "open"

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self._state == "lost"

    @property
    def is_peer_gone(self) -> bool:
        """Whether prefilld's process is proved gone."""
        return self._watch.is_gone

    def status(self) -> dict[str, object]:
        """Return what STATUS tells of the link."""
        pool = self._pool.mapped
        return {
            "state": self._state,
            "peer_pid": self.pid,
            "access": self._pool.access.way,
            "access_because": self._pool.access.because,
            "bandwidth_gb_s": None if pool is None else round(pool.bandwidth_gb_s, 3),
            "rtt_us": self._pulse.rtt_us if self.is_open else None,
        }

    @property
    def peer_pool(self) -> PeerPool:
        """Prefilld's pool as mapped here; the state tables put MAPPED before any lease."""
        assert self._pool.mapped is not None, "a lease came before the pool was mapped"
        return self._pool.mapped

    @property
    def is_mapped(self) -> bool:
        """Whether prefilld's pool is mapped for this link."""
        return self._pool.is_mapped

    @property
    def lost_for_s(self) -> float:
        """How long ago the connection ended; 0 where it lives."""
        return 0 if self._lost_s is None else self._now_s() - self._lost_s

    def close_mapping(self) -> bool:
        """Unmap the pool once no copy can read it; True when that is done.

        To be called again until then.  The caller knows of no other reader.
        """
        return self.is_lost and self.intake.is_empty and self._pool.unmap()

    # --- life --------------------------------------------------------------------------------

    def welcome(self, instance: wire.Instance, *, held: list[int], pool_blocks: int) -> None:
        """Take the link."""
        self._socket.send(
            wire.Welcome(
                instance=instance,
                access=self._pool.access.way,
                held=held,
                pool_blocks=pool_blocks,
                credits=self._credits(),
            )
        )

    def send(self, message: wire.Message, *, on_sent: Callable[[], None] | None = None) -> None:
        """Send a message; over a link that is lost it is dropped."""
        told = getattr(message, "credits", None)
        if isinstance(told, wire.Credits):
            self._told = told
        self._socket.send(message, on_sent=on_sent)

    def tell_credits(self) -> None:
        """Tell prefilld about room that came free, or is gone, if it was not told yet."""
        if not self.is_open:
            return
        now = self._credits()
        if self._told is None or is_outdated(self._told, now):
            self.send(wire.CreditUpdate(credits=now))

    def tick(self) -> None:
        """Ask whether prefilld lives; to be called several times a ping interval."""
        timeout_s = self._service.config.link.handshake_timeout_s
        is_young = self._state in ("handshake", "mapping")
        if is_young and self._now_s() - self._began_s >= timeout_s:
            self._service.log.error("link.unfinished", timeout_s=timeout_s)
            self._socket.close()
        if self.is_open:
            self._pulse.tick()

    def give_way(self) -> None:
        """Read what a dead prefilld sent before it died, and end this link for the next one."""
        self._socket.shutdown_read_and_drain()

    def leave(self) -> None:
        """Say BYE and close."""
        if self.is_open:
            self._is_parting = True
            self.send(wire.Bye())
        if self._socket.is_open:
            self._socket.close_when_flushed()
        self._watch.close()

    def refuse(self, refusal: wire.Refuse) -> None:
        """Say why the link cannot be, and close it."""
        self._service.log.error(
            "link.refused",
            code=refusal.code,
            field=refusal.field,
            ours=refusal.ours,
            theirs=refusal.theirs,
        )
        self._state = "refused"
        self.send(refusal)
        self._socket.close_when_flushed()

    # --- messages ----------------------------------------------------------------------------

    def on_message(self, message: wire.Message, fds: list[int] | None) -> None:
        """Take a message behind HELLO; its descriptors are ours to close or to pass on."""
        self._pulse.heard()
        if isinstance(message, wire.Bye):
            self._is_parting = True
            self._socket.close()  # nothing follows it, and nothing may be sent any more
            return
        try:
            self._dispatch(message, fds)
        except InvalidMessageError as error:
            for descriptor in fds or ():
                with suppress(OSError):
                    os.close(descriptor)
            self.refuse(contradiction(str(error)))

    def on_closed(self, reason: CloseReason) -> None:
        """The connection ended, and its queue was read to the end."""
        was_open = self.is_open
        self._state, self._lost_s = "lost", self._now_s()
        if was_open and self._is_parting:
            self._service.log.info("link.closed", num_held=len(self.intake.held))
        elif was_open:
            self._service.log.warning(
                "link.lost",
                reason=reason.kind.value,
                error=None if reason.error is None else str(reason.error),
                peer_is_gone=self.is_peer_gone,
                num_held=len(self.intake.held),
            )
        self._watch.close()
        self._handler.on_lost(self)

    def _dispatch(self, message: wire.Message, fds: list[int] | None) -> None:
        match message:
            case wire.Map():
                self._state = "mapping"
                self._service.spawn(self._map(message, fds), name="map")
            case wire.Chunk():
                pool = self.peer_pool
                check_chunk(message, pool.layout, pool.num_slots, num_events=pool.num_events)
                self._handler.on_chunk(self, message)
            case wire.Handoff():
                pool, vocab_size = self.peer_pool, self._host.spec.vocab_size
                check_handoff(message, pool.layout, pool.num_slots, vocab_size)
                self._handler.on_handoff(self, message, connection_among(fds))
            case wire.Abort():
                self._handler.on_abort(self, message)
            case wire.Ping(sent_ns=sent_ns):
                self.send(wire.Pong(sent_ns=sent_ns, credits=self._credits()))
            case wire.Pong():
                self._pulse.answered(message)
            case wire.Refuse(code=code, message=text):
                self._service.log.error("link.refused", code=code, reason=text)
            case _:
                pass  # the state tables let nothing else through

    # --- hand-shake --------------------------------------------------------------------------

    async def _map(self, message: wire.Map, fds: list[int] | None) -> None:
        """Map the pool on the engine thread, read the proof through it, and say so."""
        pool = await self._pool.map(message, fds)
        if isinstance(pool, wire.Refuse):
            self.refuse(pool)
            return
        if self._pool.access.way == "direct":
            # Bounded by the hand-shake's deadline, which ends the state.
            while not self._handler.may_read_in_place(self) and self._state == "mapping":  # noqa: ASYNC110
                await asyncio.sleep(UNMAP_POLL_S)
            refusal = await self._pool.begin_direct()
            if refusal is not None:
                self.refuse(refusal)
                return
        if self._state != "mapping":
            return  # the link ended meanwhile
        self._state = "open"
        self.send(
            wire.Mapped(
                digest=pool.digest,
                bandwidth_gb_s=pool.bandwidth_gb_s,
                credits=self._credits(),
            )
        )
        if self._service.draining.is_set():
            self.send(wire.Drain())
        self._service.log.info(
            "link.opened",
            peer_pid=self.pid,
            access=self._pool.access.way,
            bandwidth_gb_s=round(pool.bandwidth_gb_s, 3),
        )

    def _credits(self) -> wire.Credits:
        return self._handler.credits(self)

    def _now_s(self) -> float:
        return self._service.clock.monotonic_ns() / NS_PER_S
