"""Reaching sockets: every way it fails is one line that says what to do."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from protocol.errors import (
    ListenQueueFullError,
    NoSuchSocketError,
    NotListeningError,
    SocketForbiddenError,
    SocketPathError,
    UnixSocketError,
)
from protocol.unix import check_path, connect_unix, peer_credentials

NOBODY = 65_534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def listening(path: Path, backlog: int = 8) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(backlog)
    return sock


def as_nobody(path: Path) -> str:
    """Connect as a user without groups; return what the error says."""
    groups, gid, uid = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(SocketForbiddenError, match="user nobody may not connect") as caught:
            connect_unix(path)
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that every user can enter, whatever pytest's own are."""
    for place in [tmp_path, *tmp_path.parents]:
        if place.stat().st_uid == os.geteuid() and place != Path(place.anchor):
            place.chmod(place.stat().st_mode | stat.S_IXOTH)
    return tmp_path


def test_a_connected_socket_never_blocks(tmp_path: Path) -> None:
    """It goes to an event loop, and no program it starts inherits it."""
    with listening(tmp_path / "s"), connect_unix(tmp_path / "s") as sock:
        assert sock.gettimeout() == 0
        assert not sock.get_inheritable()


def test_the_peer_is_who_the_kernel_says(tmp_path: Path) -> None:
    """Authorisation rests on this, so it must not come from the peer's own words."""
    with listening(tmp_path / "s") as server, connect_unix(tmp_path / "s"):
        accepted, _ = server.accept()
        with accepted:
            assert peer_credentials(accepted) == (os.getpid(), os.geteuid(), os.getegid())


def test_nothing_at_the_path(tmp_path: Path) -> None:
    """The daemons were never started, or the path is another."""
    with pytest.raises(NoSuchSocketError, match=r"^no socket at .*/s; start the daemons"):
        connect_unix(tmp_path / "s")
    (tmp_path / "file").touch()
    with pytest.raises(NoSuchSocketError, match=r"^no socket at"):
        connect_unix(tmp_path / "file" / "s")


def test_a_socket_that_its_daemon_left_behind(tmp_path: Path) -> None:
    """Killed daemons leave their sockets."""
    listening(tmp_path / "s").close()
    with pytest.raises(
        NotListeningError, match=r"nobody listens on .*/s; its daemon is not running"
    ):
        connect_unix(tmp_path / "s")


def test_a_daemon_that_is_behind_with_its_connections(tmp_path: Path) -> None:
    """A full queue is told at once, not waited for."""
    with (
        listening(tmp_path / "s", backlog=0),
        connect_unix(tmp_path / "s"),
        pytest.raises(ListenQueueFullError, match="full queue of connections; try again"),
    ):
        connect_unix(tmp_path / "s")


def test_another_kind_of_socket(tmp_path: Path) -> None:
    """A datagram socket at the path is a configuration mistake."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "s"))
        with pytest.raises(SocketPathError, match="is not a stream socket"):
            connect_unix(tmp_path / "s")


@needs_root
def test_a_user_outside_the_group_is_told_which_to_join(folder: Path) -> None:
    """`Permission denied` alone says neither who nor what."""
    with listening(folder / "s"):
        (folder / "s").chmod(0o660)
        text = as_nobody(folder / "s")
    assert text.endswith(f"join the group root, which owns {folder / 's'}")


@needs_root
def test_a_closed_folder_is_named_and_not_the_socket_in_it(folder: Path) -> None:
    """The socket cannot even be seen from outside."""
    (folder / "run").mkdir(mode=0o750)
    with listening(folder / "run" / "s"):
        (folder / "run" / "s").chmod(0o666)
        text = as_nobody(folder / "run" / "s")
    assert text.endswith(f"join the group root, which owns {folder / 'run'}")


@needs_root
def test_a_socket_of_one_user_alone_says_whose(folder: Path) -> None:
    """No group helps with mode 0600."""
    with listening(folder / "s"):
        (folder / "s").chmod(0o600)
        text = as_nobody(folder / "s")
    assert text.endswith(f"only user root may use {folder / 's'}")


@pytest.mark.parametrize("num_bytes", [107, 108, 500])
def test_the_kernels_limit_on_paths_is_told_with_the_number(num_bytes: int) -> None:
    """107 bytes fit; more would be an obscure OSError, or cut."""
    path = "/" + "x" * (num_bytes - 1)
    if num_bytes <= 107:
        check_path(path)
        return
    with pytest.raises(SocketPathError, match=f"socket path of {num_bytes} bytes exceeds .* 107"):
        connect_unix(path)


def test_the_limit_counts_bytes_and_not_letters() -> None:
    """An umlaut is two of them."""
    with pytest.raises(SocketPathError, match="socket path of 121 bytes"):
        check_path("/" + "ü" * 60)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    """An empty path would make an autobound abstract socket."""
    with pytest.raises(SocketPathError, match="is not a path of a socket") as caught:
        check_path(path)
    assert isinstance(caught.value, UnixSocketError | OSError)
    assert caught.value.path == path


def test_a_process_that_may_open_no_more_is_told_so(tmp_path: Path) -> None:
    """Whoever asks for much at a time meets it; it is no fault of the daemon's."""
    with listening(tmp_path / "d.sock"):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(UnixSocketError, match="too many open files; ask for less at a"):
                connect_unix(tmp_path / "d.sock")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_socket_that_is_removed_while_it_refuses_is_one_to_come_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that ends closes it first; a client that resumes must not take it for a file."""
    path = tmp_path / "d.sock"
    listening(path).close()

    def gone(_path: str) -> os.stat_result:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("protocol.unix.os.stat", gone)
        with pytest.raises(NotListeningError, match="its daemon is not running"):
            connect_unix(path)
