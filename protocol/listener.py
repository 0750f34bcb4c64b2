"""Listening on a Unix socket: alone, under the right permissions, and never in another's way.

A lock file beside the socket says whose the path is, for `bind` alone would let a second instance
take it from a first that goes on living, unreachable.
"""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from protocol.errors import (
    AddressInUseError,
    ListenQueueFullError,
    NotListeningError,
    SocketPathError,
)
from protocol.unix import check_path, connect_unix, new_socket, peer_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

# Connections that wait for `accept`.  The kernel cuts it to net.core.somaxconn (4,096 by
# default); a full queue makes `connect` fail at once, so it is generous.
BACKLOG = 1024


class Listener:
    """A listening socket and the lock that makes it the only one at its path.

    The lock file stays behind on purpose: removing it could take the lock of a successor that
    has opened it already.
    """

    def __init__(
        self, sock: socket.socket, path: str, lock_fd: int, *, is_inherited: bool = False
    ) -> None:
        self.socket, self.path = sock, path
        self.is_inherited = is_inherited
        """Whether the service manager made the socket.  It goes on listening after `close`, so
        connections wait for whoever is started next."""
        self._lock_fd = lock_fd
        self._identity = _identity(path)

    def close(self) -> None:
        """Stop listening and remove a socket of our own, unless another one lies there by now."""
        if self._lock_fd < 0:
            return
        self.socket.close()
        with suppress(OSError):
            if not self.is_inherited and _identity(self.path) == self._identity:
                os.unlink(self.path)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def listen_unix(
    path: str | Path, *, mode: int = 0o660, group: str | None = None, backlog: int = BACKLOG
) -> Listener:
    """Listen at `path`, alone.  A socket that a dead process left there is taken over.

    The umask is changed for the moment of `bind`, so call this before other threads make files.

    Args:
        path: Where; its folder exists.
        mode: Permissions of the socket; connecting needs write permission.
        group: Name of the group that owns the socket; None leaves the process's own.
        backlog: Connections that may wait for `accept`.

    Raises:
        AddressInUseError: Another process listens there.
        SocketPathError: The path cannot hold the socket: too long, no folder, no permission,
            something else lies there, no such group, or the mode did not take.
    """
    path = str(path)
    check_path(path)
    lock_fd = _lock(path)
    try:
        _clear_stale(path)
        sock = new_socket()
        try:
            _bind(sock, path, mode=mode, group=group)
            sock.listen(backlog)
            return Listener(sock, path, lock_fd)
        except BaseException:
            sock.close()
            raise
    except BaseException:
        os.close(lock_fd)
        raise


def inherit_unix(sock: socket.socket, path: str | Path) -> Listener:
    """Take over a socket that a service manager listens on for us.

    Args:
        sock: The socket, owned from here on, also when it is refused.
        path: Where it should listen.

    Raises:
        AddressInUseError: A process of our kind has the path's lock.
        SocketPathError: It is not a stream socket that listens at `path`, or everybody may
            connect to it.
    """
    path = str(path)
    try:
        _check_inherited(sock, path)
        sock.setblocking(False)
        return Listener(sock, path, _lock(path), is_inherited=True)
    except BaseException:
        sock.close()
        raise


def _check_inherited(sock: socket.socket, path: str) -> None:
    fault = ""
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        fault = "is not a Unix stream socket"
    elif not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        fault = "does not listen"
    elif sock.getsockname() != path:
        fault = f"listens at {sock.getsockname()!r}"
    elif (mode := stat.S_IMODE(os.stat(path).st_mode)) & stat.S_IWOTH:
        fault = f"has mode {mode:04o}, so that everybody may connect"
    if fault:
        raise SocketPathError(
            f"the socket that was passed in for {path} {fault}; put its unit right", path=path
        )


def _lock(path: str) -> int:
    """Return an open, locked descriptor of the lock file beside the socket; it holds our pid."""
    lock_path = f"{path}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(lock_path, flags, 0o600)
    except OSError as error:
        raise SocketPathError(
            f"cannot make the lock file {lock_path}: {error.strerror}; "
            "its folder must exist, and both be ours to write",
            path=path,
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).strip()
        os.close(fd)
        raise AddressInUseError(path=path, pid=int(owner) if owner.isdigit() else None) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _clear_stale(path: str) -> None:
    """Remove a dead socket at `path`; we hold the lock, so nobody of our kind lives there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise SocketPathError(
            f"{path} is in the way and is not a socket; remove it or use another path", path=path
        )
    try:
        with connect_unix(path) as probe:
            raise AddressInUseError(path=path, pid=peer_credentials(probe).pid or None)
    except ListenQueueFullError:
        raise AddressInUseError(path=path, pid=None) from None
    except NotListeningError:
        os.unlink(path)


def _bind(sock: socket.socket, path: str, *, mode: int, group: str | None) -> None:
    with _umask(0o777 & ~mode):
        try:
            sock.bind(path)
        except OSError as error:
            raise SocketPathError(f"cannot bind {path}: {error.strerror}", path=path) from error
    try:
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        actual = stat.S_IMODE(os.lstat(path).st_mode)
    except (KeyError, PermissionError) as error:
        os.unlink(path)
        raise SocketPathError(f"cannot give {path} to group {group}: {error}", path=path) from error
    if actual != mode:  # a folder's default ACL can do that
        os.unlink(path)
        raise SocketPathError(f"{path} has mode {actual:o}, not {mode:o}", path=path)


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
