"""Takes over the socket that a service manager listened on before it started this process.

See sd_listen_fds(3).  Clients may then connect at any time: while nothing runs, while a model
loads, over a restart; they wait in the kernel's queue, which no process owns.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

FIRST_FD = 3
"""By sd_listen_fds(3)'s convention, behind the standard streams."""

COUNT_VARIABLE = "LISTEN_FDS"
PID_VARIABLE = "LISTEN_PID"
NAMES_VARIABLE = "LISTEN_FDNAMES"


def take_activated(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that was passed in, closed on exec; None where there is none.

    Args:
        environ: The environment, out of which everything about sockets is taken, so that no
            child believes them its own.

    Raises:
        ConfigError: They were meant for another process, or there is not exactly one.
    """
    count = environ.pop(COUNT_VARIABLE, "")
    pid = environ.pop(PID_VARIABLE, "")
    names = environ.pop(NAMES_VARIABLE, "")
    if not count:
        return None
    if pid != str(os.getpid()):
        raise ConfigError(
            f"{COUNT_VARIABLE} is set, but for process {pid or '(none)'} instead of this one, "
            f"{os.getpid()}",
            hint="start the daemon itself in ExecStart=, not a script around it",
        )
    if count != "1":
        raise ConfigError(
            f"{count} sockets were passed in ({names or 'unnamed'}) where one is expected",
            hint="give the service one ListenStream= in one .socket unit",
        )
    try:
        os.set_inheritable(FIRST_FD, False)
        return socket.socket(fileno=FIRST_FD)
    except OSError as error:
        raise ConfigError(
            f"descriptor {FIRST_FD}, which was passed in as {names or 'a socket'}, "
            f"is none: {error.strerror}"
        ) from error
