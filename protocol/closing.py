"""Why a connection ended, in words that a log line and a metric can share."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class CloseKind(Enum):
    """Why a connection ended."""

    GONE = "the peer closed its end, or died"
    PROTOCOL = "the peer broke the rules"
    SLOW = "the peer does not read"
    LOCAL = "this side closed it"
    FAULT = "the kernel refused to go on"


class CloseReason(NamedTuple):
    """Why a connection ended, and the error behind it where there is one."""

    kind: CloseKind
    error: Exception | None = None
