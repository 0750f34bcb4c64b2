"""Finding both daemons from the command line: prefilld knows where its decoded is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from shared.config.paths import beside

DAEMONS = ("prefilld", "decoded")

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers STATUS from its event loop, whatever its engine does."""


def find_sockets(prefilld_socket: Path) -> dict[str, Path]:
    """Return both sockets; decoded's lies beside prefilld's unless that tells another place."""
    told: object = None
    with suppress(ProtocolError, RequestError):
        status = Client(prefilld_socket, timeout_s=ANSWER_TIMEOUT_S).status()
        told = status.get("decoded_socket")
    return {
        "prefilld": prefilld_socket,
        "decoded": Path(told) if isinstance(told, str) else beside(prefilld_socket),
    }
