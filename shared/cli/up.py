"""`kvpair up`: both daemons in the foreground, and perhaps a command that uses them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from shared.cli.children import blocked_signals
from shared.cli.parameters import Number
from shared.cli.supervisor import Command, Daemon, PairFailedError, Supervisor
from shared.config.options import ConfigFlags, config_options

START_TIMEOUT_S = 300.0
"""How long a command waits for the pair: a large model takes minutes to load."""

MAX_START_TIMEOUT_S = 86_400.0
"""Most that may be asked for: no model takes a day to load."""

ANSWER_TIMEOUT_S = 1.0
"""For one STATUS while waiting; a daemon that is slower does not serve yet."""

DAEMONS = ("decoded", "prefilld")
"""In the order in which they start: either may be first, and decoded is who is connected to."""


@click.command(context_settings={"allow_interspersed_args": False})
@config_options
@click.option(
    "--start-timeout",
    type=Number(min=0, min_open=True, max=MAX_START_TIMEOUT_S),
    default=START_TIMEOUT_S,
    metavar="SECONDS",
    help=f"How long COMMAND waits for the pair [{START_TIMEOUT_S:g}].",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def up(flags: ConfigFlags, *, start_timeout: float, command: tuple[str, ...]) -> int:
    """Run both daemons in the foreground.

    Their logs are on stderr.  A daemon that dies is started again.  With COMMAND, put behind
    "--", the pair runs until COMMAND ends, and its exit status is kvpair's.
    """
    config = flags.resolve().config
    sockets = {name: Path(getattr(config, name).socket) for name in DAEMONS}
    daemons = [
        # -P: a folder in the present directory that is called as a daemon must not be run.
        Daemon(name=name, argv=[sys.executable, "-P", "-m", name, *flags.arguments])
        for name in DAEMONS
    ]
    with blocked_signals() as signals:
        supervisor = Supervisor(
            daemons=daemons,
            environ=os.environ,
            signals=signals,
            is_ready=lambda pids: all(_serves(sockets[name], pids[name]) for name in DAEMONS),
            num_requests=lambda name: _num_requests(sockets[name]),
            say=lambda text: click.echo(f"kvpair: {text}", err=True),
            start_timeout_s=start_timeout,
            drain_timeout_s=config.limits.drain_timeout_s,
        )
        try:
            return supervisor.run(_beside_the_pair(command, sockets["prefilld"]))
        except PairFailedError as error:
            click.echo(f"kvpair: {error}", err=True)
            return error.code


def _serves(socket: Path, pid: int) -> bool:
    """Return whether this very process says that it serves: its link is open and proved."""
    try:
        status = Client(socket, timeout_s=ANSWER_TIMEOUT_S).status()
    except (ProtocolError, RequestError):
        return False
    return status.get("state") == "serving" and status.get("pid") == pid


def _num_requests(socket: Path) -> int | None:
    """Return how many requests a daemon has, or None where it does not tell."""
    try:
        requests = Client(socket, timeout_s=ANSWER_TIMEOUT_S).status().get("requests")
    except (ProtocolError, RequestError):
        return None
    total = requests.get("total") if isinstance(requests, dict) else None
    return total if isinstance(total, int) else None


def _beside_the_pair(command: tuple[str, ...], prefilld_socket: Path) -> Command | None:
    """Return the command with an environment in which `kvpair` finds this pair."""
    if not command:
        return None
    path = os.environ.get("PATH", os.defpath)
    programs = str(Path(sys.executable).parent)  # where this installation's `kvpair` lies
    return Command(
        argv=command,
        environ={
            **os.environ,
            "KVPAIR_SOCKET": str(prefilld_socket),
            "PATH": f"{programs}{os.pathsep}{path}",
        },
    )
