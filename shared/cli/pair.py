"""Finding both daemons from the command line: prefilld knows where its decoded is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.config.paths import beside

DAEMONS = ("prefilld", "decoded")


def decoded_socket(prefilld_socket: Path, status: Mapping[str, object] | None) -> Path:
    """Return where decoded listens.

    Args:
        prefilld_socket: Where prefilld listens; decoded's lies beside it by default.
        status: prefilld's STATUS, which tells another place; None where it does not answer.
    """
    told = (status or {}).get("decoded_socket")
    return Path(told) if isinstance(told, str) else beside(prefilld_socket)
