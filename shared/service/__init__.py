"""The frame that both daemons stand in: `run_daemon` is all that their `__main__` calls.

    async def app(service: Service) -> None:
        import torch                                  # heavy things inside, not above
        ...load, listen...
        service.set_state(DaemonState.WAITING)        # READY for the service manager
        ...serve until `service.draining` is set, finish what was begun, return...

    run_daemon("prefilld", app)

An app that raises a `KvpairError` refuses to run: one line, that error's exit code.  Anything
else it raises is a failure: a traceback in the log and exit code 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from shared.config.options import ConfigFlags, config_options
from shared.config.paths import prepare_socket_directory
from shared.errors import ExitCode, KvpairError
from shared.service.notify import NOTIFY_VARIABLE
from shared.version import __version__

if TYPE_CHECKING:  # the frame imports asyncio, structlog and more, which `--help` does not need
    from shared.service.frame import DaemonName, Service

__all__ = ["run_daemon"]


def run_daemon(
    name: DaemonName,
    app: Callable[[Service], Awaitable[None]],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parse the command line, resolve the configuration, run the app, leave with an exit code.

    Args:
        name: The daemon's name; also its section of the configuration.
        app: Serves until `service.draining` is set.
        argv: The command line behind the program's name; None takes the process's own.
    """
    try:
        flags = _parse(name, argv)
        resolved = flags.resolve()
        section = getattr(resolved.config, name)
        prepare_socket_directory(Path(section.socket).parent, group=section.group)
    except KvpairError as error:
        _refuse(name, error)
    from shared.service.process import serve  # noqa: PLC0415  see TYPE_CHECKING above

    serve(name, app, resolve=flags.resolve, resolved=resolved)


def _refuse(name: DaemonName, error: KvpairError) -> NoReturn:
    """Say in one line why the daemon does not run, and leave."""
    if NOTIFY_VARIABLE in os.environ:
        from shared.service.process import log_refusal  # noqa: PLC0415  as above

        log_refusal(name, error)
    else:
        click.echo(f"{name}: {error}", err=True)
    sys.exit(error.exit_code)


def _parse(name: DaemonName, argv: Sequence[str] | None) -> ConfigFlags:
    """Return the flags; end the process where they ask for help or make no sense."""

    @click.command(
        name,
        help=f"Run {name} in the foreground; it logs to stderr.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    @click.version_option(__version__, prog_name=name)
    @config_options
    def command(flags: ConfigFlags) -> ConfigFlags:
        return flags

    try:
        parsed = command.main(argv, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    if not isinstance(parsed, ConfigFlags):  # --help and --version print, and yield a status
        sys.exit(ExitCode.OK)
    return parsed
