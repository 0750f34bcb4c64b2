"""`kvpair metrics`: both daemons' metrics in Prometheus' text format, as one scrape."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from shared.cli.pair import DAEMONS, decoded_socket
from shared.cli.parameters import FILE_NAME
from shared.config.paths import client_socket
from shared.errors import ExitCode

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers METRICS from its event loop, whatever its engine does."""


@click.command
@click.option("--daemon", type=click.Choice(DAEMONS), help="Only this one's; the default is both.")
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def metrics(*, daemon: str | None, socket: str | None) -> ExitCode:
    """Print both daemons' metrics in Prometheus' text format.

    Where one of them does not answer, the other's are printed, and the exit code is 69.
    """
    prefilld_socket = client_socket(os.environ, chosen=socket)
    status = None
    with suppress(ProtocolError, RequestError):
        status = Client(prefilld_socket, timeout_s=ANSWER_TIMEOUT_S).status()
    sockets = {"prefilld": prefilld_socket, "decoded": decoded_socket(prefilld_socket, status)}
    names = DAEMONS if daemon is None else (daemon,)
    texts = [text for name in names if (text := _ask(name, sockets[name])) is not None]
    click.echo(merge(texts), nl=False)
    return ExitCode.OK if len(texts) == len(names) else ExitCode.NO_DAEMON


def _ask(name: str, socket: Path) -> str | None:
    """Return a daemon's metrics, or None where it does not answer; stderr is told why."""
    try:
        return Client(socket, timeout_s=ANSWER_TIMEOUT_S).metrics()
    except (ProtocolError, RequestError) as error:
        click.echo(f"kvpair: {name}: {error}", err=True)
        return None


def merge(texts: Iterable[str]) -> str:
    """Return several expositions as one: a family's head stands once, before all its series.

    The series themselves differ already: each carries its daemon's name.
    """
    families: dict[str, dict[str, None]] = {}  # a family's lines, each once, in their order
    for text in texts:
        family: dict[str, None] = {}
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], {})
            family.setdefault(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)
