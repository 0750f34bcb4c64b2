"""A daemon's socket, with its faults told as the user's to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import AddressInUseError, UnixSocketError
from protocol.listener import Listener, listen_unix
from shared.errors import ConfigError, EnvironmentUnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


def open_listener(path: Path, *, group: str | None = None) -> Listener:
    """Listen at `path`, alone; before anything is loaded, so that a second instance ends at once.

    Raises:
        EnvironmentUnsupportedError: Another daemon has the socket.
        ConfigError: No socket can be there.
    """
    try:
        return listen_unix(path, group=group)
    except AddressInUseError as error:
        raise EnvironmentUnsupportedError(str(error)) from error
    except UnixSocketError as error:
        raise ConfigError(str(error)) from error
