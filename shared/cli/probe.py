"""`kvpair probe`: one yes or no about one daemon, for whatever restarts daemons that hang.

A port that takes connections proves nothing: the event loop answers for ever while a GPU call
hangs.  So the daemon is asked how long ago its engine thread last moved.
"""

from __future__ import annotations

import os
from typing import cast

import click

from protocol.client import Client
from shared.cli.parameters import FILE_NAME, Number
from shared.config.paths import beside, client_socket
from shared.errors import DaemonBusyError, DaemonUnavailableError, ExitCode, KvpairError
from shared.states import READY_STATES, DaemonName, DaemonState

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers STATUS from its event loop, whatever its engine does."""

MAX_SILENCE_S = 60.0
"""As WatchdogSec= in the units: longer than the longest step."""

LONGEST_SILENCE_S = 86_400.0
"""Most that may be asked for: a day of silence is the end of any engine."""


@click.command
@click.argument("daemon", type=click.Choice(("prefilld", "decoded")))
@click.option("--ready", is_flag=True, help="Ask whether it can serve, too.")
@click.option(
    "--max-silence",
    "max_silence_s",
    type=Number(min=0, min_open=True, max=LONGEST_SILENCE_S),
    default=MAX_SILENCE_S,
    metavar="SECONDS",
    help=f"Longest time without progress of its engine [{MAX_SILENCE_S:g}].",
)
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def probe(*, daemon: str, ready: bool, max_silence_s: float, socket: str | None) -> ExitCode:
    """Ask whether a daemon still works.

    Exits with 0 where it does.  Otherwise one line says why, and the exit code is 69 where the
    daemon does not answer or its engine is stuck, and 75 where it is not ready, with --ready.
    """
    name = cast("DaemonName", daemon)
    path = client_socket(os.environ, chosen=socket)
    path = path if name == "prefilld" else beside(path)
    status = Client(path, timeout_s=ANSWER_TIMEOUT_S).status()
    fault = judge(name, status, is_ready_asked=ready, max_silence_s=max_silence_s)
    if fault is not None:
        raise fault
    return ExitCode.OK


def judge(
    name: DaemonName,
    status: dict[str, object],
    *,
    is_ready_asked: bool,
    max_silence_s: float,
) -> KvpairError | None:
    """Return what is wrong with a daemon by its own STATUS; None where nothing is."""
    silent_s = status.get("silent_s")
    if not isinstance(silent_s, int | float):
        return DaemonUnavailableError(f"{name} does not tell whether its engine moves")
    if silent_s > max_silence_s:
        return DaemonUnavailableError(
            f"the engine of {name} has not moved for {silent_s:.0f} s", hint="restart it"
        )
    if is_ready_asked and status.get("state") not in {str(s) for s in READY_STATES[name]}:
        return DaemonBusyError(f"{name} is {status.get('state', DaemonState.LOADING)}")
    return None
