"""What a service manager is told, and what it asks for: see sd_notify(3), sd_watchdog_enabled(3).

Without a service manager every call does nothing.  No call ever blocks or raises: a manager
that does not read must not stop a daemon.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from shared.clock import NS_PER_US

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"

US_PER_S = 1_000_000


class Notifier:
    """Sends states to the service manager.

    Args:
        address: Where to: an absolute path, or `@` and an abstract name.  Anything else,
            None included, means that nobody wants to know.
    """

    def __init__(self, address: str | None) -> None:
        self._address: str | None = None
        if address and address[0] in "/@" and len(address) > 1:
            self._address = "\0" + address[1:] if address[0] == "@" else address

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Take the address out of the environment, so that no child speaks in our name."""
        return cls(environ.pop(NOTIFY_VARIABLE, None))

    def ready(self) -> bool:
        """Say that start-up, or a reload, is done."""
        return self._send("READY=1")

    def status(self, status: str) -> bool:
        """Describe in one line what the daemon is doing."""
        return self._send(f"STATUS={' '.join(status.split())}")

    def reloading(self, *, now_ns: int) -> bool:
        """Say that the configuration is being read again; `ready` ends it.

        Args:
            now_ns: CLOCK_MONOTONIC, by which the manager tells one reload from the next.
        """
        return self._send("RELOADING=1", f"MONOTONIC_USEC={now_ns // NS_PER_US}")

    def stopping(self, *, within_s: float) -> bool:
        """Say that the daemon is shutting down, and ask for the time that this may take."""
        return self._send("STOPPING=1", _extension(within_s))

    def extend_timeout(self, duration_s: float) -> bool:
        """Ask for so much time from now on before a start counts as failed."""
        return self._send(_extension(duration_s))

    def alive(self) -> bool:
        """Feed the watchdog."""
        return self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> bool:
        """Return whether the kernel took the datagram."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(assignments).encode(errors="replace"), self._address)
        except OSError:  # the manager is gone, or does not read
            return False
        return True


def watchdog_period_s(environ: MutableMapping[str, str]) -> float | None:
    """Take the watchdog's period out of the environment, in seconds.

    Returns:
        None where the manager watches nobody, or another process than this one.
    """
    period_us = environ.pop(WATCHDOG_VARIABLE, "")
    pid = environ.pop(WATCHDOG_PID_VARIABLE, str(os.getpid()))
    if not period_us.isdecimal() or int(period_us) == 0 or pid != str(os.getpid()):
        return None
    return int(period_us) / US_PER_S


def _extension(duration_s: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(duration_s * US_PER_S)}"
