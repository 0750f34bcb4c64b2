"""Where metrics may be told over HTTP: this machine's loopback, or a Unix socket.

Metrics name no user and no prompt, but how busy a machine is is not for the network either, and
there are no accounts here: who shall see them from elsewhere puts a proxy in between.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from shared.config.paths import check_socket_path
from shared.errors import ConfigError

MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class LoopbackAddress:
    """A TCP port that only this machine can reach."""

    host: str
    port: int
    """0 takes any free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


HttpAddress = LoopbackAddress | Path


def parse_http_address(text: str, *, origin: str) -> HttpAddress:
    """Read `127.0.0.1:9464`, `localhost:9464`, `[::1]:9464`, or a path that begins with a slash.

    Args:
        text: What was configured.
        origin: Where it stands, for the message.

    Raises:
        ConfigError: It is none of those, or not loopback.
    """
    if text.startswith("/"):
        check_socket_path(text, origin=origin)
        return Path(text)
    host, colon, port = text.rpartition(":")
    hint = "say 127.0.0.1:PORT, [::1]:PORT, or the path of a Unix socket"
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ConfigError(f"{text!r} ({origin}) is no address to tell metrics at", hint=hint)
    if host == "localhost":
        host = "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise ConfigError(f"{host!r} ({origin}) is no address", hint=hint) from error
    if not address.is_loopback:
        raise ConfigError(
            f"{text} ({origin}) can be reached from other machines, and metrics have no accounts",
            hint=hint,
        )
    return LoopbackAddress(str(address), int(port))
