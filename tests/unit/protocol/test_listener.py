"""Listening: alone, with the right permissions, and leaving others' files alone."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import AddressInUseError, SocketPathError
from protocol.listener import inherit_unix, listen_unix
from protocol.unix import connect_unix

HOLD = """
import sys
from protocol.listener import inherit_unix, listen_unix
listener = listen_unix(sys.argv[1])
print("listening", flush=True)
sys.stdin.read()
"""


def held_by_another_process(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def test_a_listener_takes_connections_and_removes_its_socket(tmp_path: Path) -> None:
    """It is non-blocking, for an event loop to accept on."""
    path = tmp_path / "s"
    with listen_unix(path) as listener, connect_unix(path):
        assert listener.socket.gettimeout() == 0
        listener.socket.accept()[0].close()
    assert not path.exists()
    listener.close()  # safe to repeat


@pytest.mark.parametrize(("mode", "umask"), [(0o660, 0o000), (0o660, 0o077), (0o600, 0o022)])
def test_the_mode_is_exact_whatever_the_umask(tmp_path: Path, mode: int, umask: int) -> None:
    """0666 would open a daemon to everybody, 0755 close it to its own group."""
    before = os.umask(umask)
    try:
        with listen_unix(tmp_path / "s", mode=mode):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_the_socket_belongs_to_the_group(tmp_path: Path) -> None:
    """Its members may connect, and nobody else."""
    with listen_unix(tmp_path / "s", group="daemon"):
        assert (tmp_path / "s").group() == "daemon"


def test_a_group_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """Nothing is left behind that a later start would have to clear."""
    with pytest.raises(SocketPathError, match=r"cannot give .* to group no-such-group"):
        listen_unix(tmp_path / "s", group="no-such-group")
    assert not (tmp_path / "s").exists()
    listen_unix(tmp_path / "s").close()


def test_a_second_instance_is_refused_by_path_and_pid(tmp_path: Path) -> None:
    """Bind alone would let it steal the path from a first that goes on living."""
    path = tmp_path / "s"
    process = held_by_another_process(path)
    try:
        with pytest.raises(AddressInUseError, match=f"process {process.pid} listens on {path}"):
            listen_unix(path)
        connect_unix(path).close()  # and the first is still reachable
    finally:
        process.communicate()


def test_a_second_listener_in_one_process_is_refused_too(tmp_path: Path) -> None:
    """The lock is on the open file, not on the process."""
    with (
        listen_unix(tmp_path / "s"),
        pytest.raises(AddressInUseError, match=f"process {os.getpid()} listens on"),
    ):
        listen_unix(tmp_path / "s")


def test_the_lock_alone_refuses_before_there_is_a_socket(tmp_path: Path) -> None:
    """Of two daemons that start at once, the one behind must not even try to bind."""
    with (tmp_path / "s.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AddressInUseError, match="another process listens on"):
            listen_unix(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_socket_of_a_killed_daemon_is_taken_over(tmp_path: Path) -> None:
    """Kill -9 leaves socket and lock file; the kernel has dropped the lock."""
    path = tmp_path / "s"
    process = held_by_another_process(path)
    process.kill()
    process.communicate()
    assert path.is_socket()
    with listen_unix(path), connect_unix(path):
        pass


def test_a_stranger_that_listens_without_a_lock_is_respected(tmp_path: Path) -> None:
    """Whoever answers at the path is alive, whatever the lock says."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "s"))
        stranger.listen(1)
        with pytest.raises(AddressInUseError, match=f"process {os.getpid()} listens on"):
            listen_unix(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as waiting:  # the probe and this one fill its queue
            waiting.connect(str(tmp_path / "s"))
            with pytest.raises(AddressInUseError, match="another process listens on"):
                listen_unix(tmp_path / "s")


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    """A misprinted path must not cost anybody a file."""
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(SocketPathError, match=f"{path} is in the way and is not a socket"):
        listen_unix(path)
    assert path.is_symlink() or path.is_dir() or path.read_text() == "precious"


def test_a_path_too_long_is_told_with_the_number(tmp_path: Path) -> None:
    """Before the lock file is made."""
    path = tmp_path / ("x" * 120)
    num_bytes = len(str(path))
    with pytest.raises(SocketPathError, match=f"socket path of {num_bytes} bytes exceeds .* 107"):
        listen_unix(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """Its making is the service manager's job."""
    with pytest.raises(SocketPathError, match=r"cannot make the lock file .*No such file"):
        listen_unix(tmp_path / "none" / "s")


def test_closing_leaves_a_successors_socket_alone(tmp_path: Path) -> None:
    """Only the file that this listener made is its own to remove."""
    path = tmp_path / "s"
    first = listen_unix(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        first.close()
        assert path.is_socket()


def listening(path: Path, *, mode: int = 0o660) -> socket.socket:
    """Return a socket as a service manager passes it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(mode)
    sock.listen()
    return sock


def test_an_inherited_socket_stays_where_it_is(tmp_path: Path) -> None:
    """It is the service manager's, who goes on listening for our successor."""
    managers = listening(tmp_path / "s")
    with managers:
        with inherit_unix(managers.dup(), tmp_path / "s") as listener:
            assert listener.is_inherited
            assert listener.socket.gettimeout() == 0
        with connect_unix(tmp_path / "s"):
            pass


def test_an_inherited_socket_is_not_taken_from_a_living_daemon(tmp_path: Path) -> None:
    """The service manager binds over whoever was there; only the lock tells."""
    holder = held_by_another_process(tmp_path / "s")
    (tmp_path / "s").unlink()
    try:
        with pytest.raises(AddressInUseError, match=f"process {holder.pid} listens on"):
            inherit_unix(listening(tmp_path / "s"), tmp_path / "s")
    finally:
        holder.communicate()


@pytest.mark.parametrize(
    ("kind", "mode", "fault"),
    [
        (socket.SOCK_STREAM, 0o666, "has mode 0666, so that everybody may connect"),
        (socket.SOCK_DGRAM, 0o660, "is not a Unix stream socket"),
        (None, 0o660, "does not listen"),
    ],
)
def test_an_inherited_socket_of_the_wrong_kind_is_refused(
    tmp_path: Path, kind: int | None, mode: int, fault: str
) -> None:
    """SocketMode= is 0666 unless somebody says otherwise."""
    sock = socket.socket(socket.AF_UNIX, kind or socket.SOCK_STREAM)
    sock.bind(str(tmp_path / "s"))
    (tmp_path / "s").chmod(mode)
    if kind is socket.SOCK_STREAM:
        sock.listen()
    with pytest.raises(SocketPathError, match=fault):
        inherit_unix(sock, tmp_path / "s")
    assert sock.fileno() == -1
