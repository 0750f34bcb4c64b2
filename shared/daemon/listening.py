"""A daemon's socket, with its faults told as the user's to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.acceptor import Acceptor
from protocol.errors import AddressInUseError, UnixSocketError
from protocol.listener import Listener, inherit_unix, listen_unix
from shared.daemon.activation import take_activated
from shared.errors import ConfigError, EnvironmentUnsupportedError

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger


def open_listener(
    path: Path, *, environ: MutableMapping[str, str], group: str | None = None
) -> Listener:
    """Listen at `path`, alone; before anything is loaded, so that a second instance ends at once.

    Args:
        path: Where.
        environ: The environment; a socket that a service manager passed is taken out of it.
        group: Whose members may connect, where the socket is ours to make.

    Raises:
        EnvironmentUnsupportedError: Another daemon has the socket.
        ConfigError: No socket can be there, or the one that was passed is not it.
    """
    activated = take_activated(environ)
    try:
        if activated is not None:
            return inherit_unix(activated, path)
        return listen_unix(path, group=group)
    except AddressInUseError as error:
        raise EnvironmentUnsupportedError(str(error)) from error
    except UnixSocketError as error:
        raise ConfigError(str(error)) from error


class Door:
    """A daemon's way in: hands over every connection, until it is shut.

    Args:
        listener: The daemon's socket; closed together with the door.
        on_connection: Gets each connection, which is its own.
    """

    def __init__(
        self,
        listener: Listener,
        on_connection: Callable[[socket.socket], None],
        *,
        loop: asyncio.AbstractEventLoop,
        log: FilteringBoundLogger,
    ) -> None:
        self._listener = listener
        self._acceptor = Acceptor(
            listener.socket,
            on_connection,
            loop=loop,
            on_exhausted=lambda error: log.error("listener.exhausted", error=str(error)),
        )

    def shut(self) -> None:
        """Accept no more, and remove the socket.  Safe to repeat."""
        self._acceptor.stop()
        self._listener.close()
