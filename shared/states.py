"""What a daemon can be doing, and how a service manager is told of it."""

from __future__ import annotations

import enum
from typing import Literal

DaemonName = Literal["prefilld", "decoded"]


class DaemonState(enum.StrEnum):
    """What a daemon is doing, as STATUS tells it."""

    LOADING = "loading"
    WAITING = "waiting-for-peer"
    SERVING = "serving"
    DRAINING = "draining"


PEERS: dict[DaemonName, DaemonName] = {"prefilld": "decoded", "decoded": "prefilld"}

READY_STATES: dict[DaemonName, frozenset[DaemonState]] = {
    "prefilld": frozenset({DaemonState.SERVING}),
    "decoded": frozenset({DaemonState.WAITING, DaemonState.SERVING}),
}
"""In which a daemon counts as started.  prefilld needs decoded for every answer, so it is ready
once their link is proved; decoded, who is connected to, once it has its model and listens."""


def describe(
    name: DaemonName, state: DaemonState, *, model: str, percent: int, num_requests: int
) -> str:
    """Return in one line of words what a daemon is doing.

    Args:
        name: The daemon.
        state: Its state.
        model: The configured model.
        percent: How much of the model is loaded.
        num_requests: Requests that are the daemon's now.
    """
    requests = "1 request" if num_requests == 1 else f"{num_requests or 'no'} requests"
    match state:
        case DaemonState.LOADING:
            return f"loading {model}, {percent} %"
        case DaemonState.WAITING:
            return f"waiting for {PEERS[name]}"
        case DaemonState.SERVING:
            return f"serving {requests}"
        case DaemonState.DRAINING:
            return f"draining, {requests} left"
