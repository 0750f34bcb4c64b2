"""The pulse of an open link, at either end: asks whether the peer lives, hears it, and times it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as wire
from shared.clock import NS_PER_S, NS_PER_US
from shared.daemon.keepalive import Keepalive, Verdict

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from protocol.sockets import MessageSocket
    from shared.clock import Clock
    from shared.config.schema import LinkConfig


class Pulse:
    """One link's.

    Args:
        socket: Where to ask, and what ends when the peer has been silent for too long.
        config: How long silence may last.
    """

    def __init__(
        self, socket: MessageSocket, *, config: LinkConfig, clock: Clock, log: FilteringBoundLogger
    ) -> None:
        self._socket, self._clock, self._log = socket, clock, log
        self._timeout_s = config.ping_timeout_s
        self._keepalive = Keepalive(
            interval_s=config.ping_interval_s, timeout_s=config.ping_timeout_s, now_s=self._now_s()
        )
        self._rtt_us: float | None = None

    @property
    def rtt_us(self) -> float | None:
        """How long the last PING took there and back; None before the first."""
        return self._rtt_us

    def ask(self) -> None:
        """Send PING."""
        self._socket.send(wire.Ping(sent_ns=self._clock.monotonic_ns()))

    def heard(self) -> None:
        """Take note that a frame arrived."""
        self._keepalive.heard(self._now_s())

    def answered(self, pong: wire.Pong) -> None:
        """Take PONG, which brings back when its PING left."""
        self._rtt_us = round((self._clock.monotonic_ns() - pong.sent_ns) / NS_PER_US, 1)

    def tick(self) -> None:
        """Ask, or give the peer up; to be called several times a ping interval.

        What a silent peer had sent before is read to its end, so an ADOPT among it still counts.
        """
        match self._keepalive.check(self._now_s()):
            case Verdict.SEND_PING:
                self.ask()
            case Verdict.PEER_SILENT:
                self._log.error("link.silent", timeout_s=self._timeout_s)
                self._socket.shutdown_read_and_drain()
            case Verdict.FINE:
                pass

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S
