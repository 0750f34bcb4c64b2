"""What a service manager is told: READY, STATUS, STOPPING, as datagrams (see sd_notify(3)).

Without a service manager every call does nothing.  No call ever blocks or raises: a manager
that does not read must not stop a daemon.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

NOTIFY_VARIABLE = "NOTIFY_SOCKET"


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

    def ready(self, status: str) -> bool:
        """Say that start-up is done."""
        return self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> bool:
        """Describe the present state in one line."""
        return self._send(f"STATUS={_one_line(status)}")

    def stopping(self, status: str) -> bool:
        """Say that the daemon is shutting down."""
        return self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def _send(self, state: str) -> bool:
        """Return whether the kernel took the datagram."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(errors="replace"), self._address)
        except OSError:  # the manager is gone, or does not read
            return False
        return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
