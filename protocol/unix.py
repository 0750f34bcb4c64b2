"""Reaching a Unix socket, and knowing who is at the other end.

Every fault here is somebody's mistake at a shell, so every error is one line that names the path
and says what to do.  Nothing waits: sockets are non-blocking from the first moment.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from protocol.errors import (
    ListenQueueFullError,
    NoSuchSocketError,
    NotListeningError,
    SocketForbiddenError,
    SocketPathError,
    UnixSocketError,
)
from protocol.limits import MAX_PATH_BYTES

_UCRED = struct.Struct("3i")  # pid, uid, gid; see unix(7)


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel saw it at `connect` or `listen`.

    Authorise by `uid` and on the accepting side only: under socket activation the connecting
    side sees the service manager.  `pid` is advisory; another PID namespace shows as 0.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return who is at the other end of a connected Unix socket."""
    return Credentials(
        *_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    )


def check_path(path: str) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        SocketPathError: It is empty, holds a NUL, or is longer than the kernel's 107 bytes.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise SocketPathError(
            f"socket path of {num_bytes} bytes exceeds the kernel's {MAX_PATH_BYTES}: {path}; "
            "use a shorter folder",
            path=path,
        )
    if not path or "\0" in path:
        raise SocketPathError(f"{path!r} is not a path of a socket", path=path)


def connect_unix(path: str | Path) -> socket.socket:
    """Return a non-blocking stream socket that is connected to the listener at `path`.

    Raises:
        SocketPathError: No socket can be there.
        NoSuchSocketError: Nothing is there.
        NotListeningError: A socket is there and nobody listens on it.
        ListenQueueFullError: The listener is behind; try again a little later.
        SocketForbiddenError: This user may not connect.
        UnixSocketError: Any other reason.
    """
    path = str(path)
    check_path(path)
    try:
        sock = new_socket()
    except OSError as error:
        raise UnixSocketError(
            f"cannot connect to {path}: {(error.strerror or str(error)).lower()}; ask for less at "
            "a time, or raise the limit (`ulimit -n`)",
            path=path,
        ) from error
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise _explain_connect(error, path) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _explain_connect(error: OSError, path: str) -> UnixSocketError:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return NoSuchSocketError(
                f"no socket at {path}; start the daemons (`kvpair up`), or name theirs with "
                "KVPAIR_SOCKET",
                path=path,
            )
        case errno.ECONNREFUSED:
            if _is_something_else(path):
                return SocketPathError(f"{path} is not a socket", path=path)
            return NotListeningError(
                f"nobody listens on {path}; its daemon is not running: start it (`kvpair up`), or "
                "wait while it restarts",
                path=path,
            )
        case errno.EAGAIN:
            return ListenQueueFullError(
                f"the daemon at {path} has a full queue of connections; try again", path=path
            )
        case errno.EACCES | errno.EPERM:
            return SocketForbiddenError(
                f"{_user_name(os.geteuid())} may not connect to {path}; {_cure(path)}", path=path
            )
        case errno.EPROTOTYPE | errno.ENOTSOCK:
            return SocketPathError(f"{path} is not a stream socket", path=path)
        case _:
            return UnixSocketError(f"cannot connect to {path}: {error.strerror}", path=path)


def _is_something_else(path: str) -> bool:
    """Whether what lies at a path is no socket; one that ended a moment ago may be gone by now."""
    with suppress(OSError):
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    return False


def _cure(path: str) -> str:
    """Say how to get access: the first folder on the way that is closed, or else the socket."""
    for place in [*reversed(Path(path).absolute().parents), Path(path)]:
        needed = os.X_OK if place != Path(path) else os.W_OK
        if os.access(place, needed, effective_ids=True):
            continue
        try:
            owner = place.stat()
        except OSError:
            break
        if owner.st_mode & (stat.S_IXGRP if needed == os.X_OK else stat.S_IWGRP):
            return f"join the group {_group_name(owner.st_gid)}, which owns {place}"
        return f"only {_user_name(owner.st_uid)} may use {place}"
    return "ask its owner for access"


def _user_name(uid: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _group_name(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def new_socket() -> socket.socket:
    """Return a non-blocking stream socket, closed on exec."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
