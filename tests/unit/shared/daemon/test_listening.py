"""A daemon's socket: alone, or an error that the user can mend."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from protocol.listener import BACKLOG
from protocol.unix import connect_unix
from shared.daemon.listening import open_listener
from shared.errors import ConfigError, EnvironmentUnsupportedError, ExitCode


def test_a_listener_takes_connections_at_its_path(tmp_path: Path) -> None:
    with open_listener(tmp_path / "d.sock", environ={}), connect_unix(tmp_path / "d.sock"):
        pass


def test_a_second_instance_is_told_whose_the_socket_is(tmp_path: Path) -> None:
    """It ends at once instead of loading a model for minutes first."""
    with (
        open_listener(tmp_path / "d.sock", environ={}),
        pytest.raises(EnvironmentUnsupportedError, match=r"process \d+ listens on .*d\.sock"),
    ):
        open_listener(tmp_path / "d.sock", environ={})


@pytest.mark.parametrize("name", ["missing/d.sock", "x" * 120])
def test_a_path_that_can_hold_no_socket_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"lock file|exceeds the kernel's 107") as caught:
        open_listener(tmp_path / name, environ={})
    assert caught.value.exit_code is ExitCode.CONFIG


def test_a_group_owns_the_socket_that_it_may_use(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    with open_listener(tmp_path / "d.sock", environ={}, group=group):
        status = (tmp_path / "d.sock").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())


def test_a_group_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-group"):
        open_listener(tmp_path / "d.sock", environ={}, group="no-such-group")


def activated(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Listen as a service manager does, and return the environment that tells of it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(0o660)
    sock.listen(BACKLOG)
    monkeypatch.setattr("shared.daemon.activation.FIRST_FD", sock.detach())
    return {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "d.socket"}


def test_a_socket_that_was_passed_in_outlives_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that come while no daemon runs wait in its queue."""
    environ = activated(tmp_path / "d.sock", monkeypatch)
    with open_listener(tmp_path / "d.sock", environ=environ) as listener:
        managers = listener.socket.dup()
        assert listener.is_inherited
        assert environ == {}
    with connect_unix(tmp_path / "d.sock"), managers:
        managers.accept()[0].close()


def test_a_socket_for_another_path_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients would wait at the one, the daemon listen at the other."""
    environ = activated(tmp_path / "other.sock", monkeypatch)
    with pytest.raises(ConfigError, match=r"for .*/d\.sock listens at '.*/other\.sock'"):
        open_listener(tmp_path / "d.sock", environ=environ)
