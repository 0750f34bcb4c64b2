"""When to ask whether the peer is still there, and when to stop believing it.  Pure.

A process that was stopped, or whose GPU hangs, keeps its sockets open: only silence tells.  Any
frame counts as a sign of life; PING is sent when there was none for an interval.
"""

from __future__ import annotations

from enum import Enum, auto


class Verdict(Enum):
    """What `Keepalive.check` asks its caller to do."""

    FINE = auto()
    SEND_PING = auto()
    PEER_SILENT = auto()


class Keepalive:
    """The deadline of one connection.

    Args:
        interval_s: Silence after which to send PING, and the pause between two of them.
        timeout_s: Silence after which the peer counts as lost.
        now_s: When the connection was made; any monotonic clock, in seconds.
    """

    def __init__(self, *, interval_s: float, timeout_s: float, now_s: float) -> None:
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._heard_s = self._asked_s = now_s

    def heard(self, now_s: float) -> None:
        """Take note that a frame arrived."""
        self._heard_s = now_s

    def check(self, now_s: float) -> Verdict:
        """Judge the silence; after `SEND_PING` the next one is due an interval later."""
        if now_s - self._heard_s >= self._timeout_s:
            return Verdict.PEER_SILENT
        if now_s - max(self._heard_s, self._asked_s) >= self._interval_s:
            self._asked_s = now_s
            return Verdict.SEND_PING
        return Verdict.FINE
