"""Where the sockets lie: the default folder, its safety, and the kernel's limit on paths.

Clients need this and nothing else of the configuration, so nothing heavy is imported here.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from protocol.limits import MAX_PATH_BYTES
from shared.errors import ConfigError, EnvironmentUnsupportedError

SYSTEM_SOCKET_DIRECTORY = Path("/run/kvpair")
"""Made by the service manager; where it exists, the machine's daemons serve everybody."""

PREFILLD_SOCKET = "prefilld.sock"
DECODED_SOCKET = "decoded.sock"

PRIVATE_DIRECTORY_MODE = 0o700

GROUP_DIRECTORY_MODE = 0o750
"""Members may pass through to the socket, and nobody but the owner may put one there."""


def default_socket_directory(
    environ: Mapping[str, str], *, system_directory: Path = SYSTEM_SOCKET_DIRECTORY
) -> Path:
    """Return the folder that holds the sockets unless somebody chose another.

    Only chooses: `prepare_socket_directory` makes it, `check_socket_directory` distrusts it.
    """
    if system_directory.is_dir():
        return system_directory
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvpair"
    return Path(environ.get("TMPDIR") or "/tmp") / f"kvpair-{os.getuid()}"  # noqa: S108  checked below


def check_socket_directory(directory: Path) -> None:
    """Refuse a folder in which somebody else could have put a socket for us to trust.

    A folder that does not exist is fine: then there is no socket either.  One that only root can
    have put there, such as `/run/kvpair`, may belong to anybody: to the daemons' user.

    Raises:
        EnvironmentUnsupportedError: It is no folder, belongs to a stranger, or others may write
            to it.
    """
    try:
        info = directory.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise EnvironmentUnsupportedError(
            f"cannot look at the socket folder {directory}: {error.strerror}"
        ) from error
    fault, hint = "", "remove it, or choose another place with KVPAIR_SOCKET"
    if not stat.S_ISDIR(info.st_mode):
        fault = "is not a folder"
    elif info.st_uid not in {0, os.getuid()} and not _is_roots_alone(directory.parent):
        fault = f"belongs to the user with number {info.st_uid}"
    elif info.st_mode & stat.S_IWOTH:
        fault = f"may be written by everybody (mode {stat.S_IMODE(info.st_mode):04o})"
        hint = (
            "choose a folder of your own below it with KVPAIR_SOCKET"
            if info.st_mode & stat.S_ISVTX  # others share it on purpose, as they do /tmp
            else f"`chmod o-w {directory}`, or choose another place with KVPAIR_SOCKET"
        )
    if fault:
        raise EnvironmentUnsupportedError(
            f"the socket folder {directory} {fault}",
            hint=hint,
        )


def _is_roots_alone(directory: Path) -> bool:
    """Whether nobody but root can put anything into a folder."""
    try:
        info = directory.stat()
    except OSError:
        return False
    return info.st_uid == 0 and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def prepare_socket_directory(directory: Path, *, group: str | None = None) -> None:
    """Make the folder for a daemon's socket where it is missing.

    It is private to the user, or open to the members of `group`.  An existing folder keeps its
    mode: its owner may have opened it.

    Raises:
        ConfigError: There is no such group.
        EnvironmentUnsupportedError: The folder cannot be made, or may not be trusted.
    """
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY_MODE)
        if group is not None:
            os.chown(directory, -1, grp.getgrnam(group).gr_gid)
            directory.chmod(GROUP_DIRECTORY_MODE)
    except FileExistsError:
        pass
    except KeyError as error:
        directory.rmdir()
        raise ConfigError(f"there is no group {group}", hint="make it, or name another") from error
    except OSError as error:
        raise EnvironmentUnsupportedError(
            f"cannot make the socket folder {directory}: {error.strerror}",
            hint="make it, or choose another place with KVPAIR_SOCKET",
        ) from error
    check_socket_directory(directory)


def check_socket_path(path: str, *, origin: str) -> None:
    """Refuse a path that no socket can have, or that STATUS could not tell.

    Raises:
        ConfigError: The path is a folder's, holds a zero byte, is too long, or is not UTF-8.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} ({origin}) has {num_bytes} bytes, "
            f"and the kernel takes at most {MAX_PATH_BYTES}",
            hint="choose a shorter one",
        )
    if "\0" in path:
        raise ConfigError(f"the socket path {path!r} ({origin}) holds a zero byte")
    if not is_utf8(path):
        raise ConfigError(f"the socket path {path!r} ({origin}) is not UTF-8")
    if _is_folder(Path(path)):
        raise ConfigError(
            f"the socket path {path} ({origin}) is a folder", hint="name a file in it"
        )


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder.  What is behind a closed folder is for `connect` to tell."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def is_utf8(text: str) -> bool:
    """Whether text can be told to anybody: bytes that are no UTF-8 are read as halves of it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def client_socket(
    environ: Mapping[str, str], *, chosen: str | None = None, chosen_by: str = "flag --socket"
) -> Path:
    """Return the path of prefilld's socket, as a client finds it.

    Args:
        environ: The environment: `KVPAIR_SOCKET`, else what the default folder depends on.
        chosen: A path that goes before both.
        chosen_by: Where `chosen` came from.

    Raises:
        ConfigError: The path cannot be one of a socket.
        EnvironmentUnsupportedError: The default folder may not be trusted.
    """
    if chosen is not None:
        path, origin = os.path.abspath(chosen), chosen_by
    elif from_environment := environ.get("KVPAIR_SOCKET"):
        path, origin = os.path.abspath(from_environment), "env KVPAIR_SOCKET"
    else:
        directory = default_socket_directory(environ)
        check_socket_directory(directory)
        path, origin = str(directory / PREFILLD_SOCKET), "default"
    check_socket_path(path, origin=origin)
    return Path(path)


def beside(prefilld_socket: Path) -> Path:
    """Return the path of decoded's socket, which lies beside prefilld's."""
    return prefilld_socket.parent / DECODED_SOCKET
