"""The `kvpair` command itself: finds the sub-command, and turns every failure into one line.

A sub-command's module is imported only when it is used.  Nothing here may import torch, numpy,
asyncio, structlog or rich, and only `up`, `model`, `doctor` and `bench` may lead to more than the
wire's client.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from protocol.errors import ListenQueueFullError, ProtocolError, RequestError, UnixSocketError
from shared.errors import ExitCode, KvpairError
from shared.version import __version__

COMMANDS: dict[str, str] = {
    "bench": "Measure how fast the running pair answers.",
    "chat": "Talk with the model, turn by turn.",
    "completion": "Print what completes commands, flags and values in a shell.",
    "config": "Show the configuration and where each value came from.",
    "doctor": "Look for what could stop the pair from serving.",
    "generate": "Answer a prompt, or a file of them.",
    "logs": "Show what both daemons logged, as one timeline.",
    "metrics": "Print both daemons' metrics in Prometheus' text format.",
    "model": "Fetch, list and describe models.",
    "probe": "Ask whether a daemon still works.",
    "status": "Show what both daemons are doing.",
    "top": "Watch both daemons, live.",
    "up": "Run both daemons in the foreground.",
}
"""Every sub-command with its first line of help, told without importing its module.

`shared.cli.<name>` has it under the same name.
"""

BUSY_CODES = frozenset({"busy", "draining"})
"""Codes of ERROR frames that say: not now."""

_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""How a file, or a terminal that is gone, takes no more."""


class LazyGroup(click.Group):
    """A group whose sub-commands are imported when they are used."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        """Import one sub-command."""
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"shared.cli.{name}"), name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sub-commands from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvpair", message="%(prog)s %(version)s")
def cli() -> None:
    """Talk to the daemons that answer prompts on this machine."""


def run(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code once everything was said."""
    try:
        result = cli.main(argv, prog_name="kvpair", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout has seen enough
        _give_up_stdout()
        return ExitCode.FAILED
    except (KvpairError, ProtocolError, RequestError) as error:
        click.echo(f"kvpair: {' '.join(str(error).split())}", err=True)
        return exit_code(error)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _give_up_stdout()
        click.echo(f"kvpair: cannot write what was asked for: {error.strerror}", err=True)
        return ExitCode.FAILED
    return result if isinstance(result, int) else ExitCode.OK


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere: Python would fail once more to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: KvpairError | ProtocolError | RequestError) -> ExitCode:
    """Return how the program ends after an error that the user was told about."""
    match error:
        case KvpairError():
            return error.exit_code
        case RequestError():
            return ExitCode.BUSY if error.code in BUSY_CODES else ExitCode.FAILED
        case ListenQueueFullError():
            return ExitCode.BUSY
        case UnixSocketError():
            return ExitCode.NO_DAEMON
        case _:
            return ExitCode.FAILED
