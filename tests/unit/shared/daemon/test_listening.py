"""A daemon's socket: alone, or an error that the user can mend."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.listener import BACKLOG, Listener
from protocol.unix import connect_unix
from shared.daemon.listening import RETRY_S, open_listener, succeed
from shared.errors import (
    ConfigError,
    EnvironmentUnsupportedError,
    ExitCode,
    PredecessorEndingError,
)
from shared.logs import get_logger
from tests.support.ending import ending_holder


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


# --- the successor of a daemon that is being torn down -------------------------------------------


def successor(
    path: Path,
    *,
    environ: dict[str, str] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    patience_s: float = 10.0,
) -> Listener:
    return asyncio.run(
        succeed(
            path,
            environ={} if environ is None else environ,
            group=None,
            log=get_logger(),
            meanwhile=meanwhile,
            patience_s=patience_s,
        )
    )


def test_a_successor_waits_for_a_daemon_that_is_ending(tmp_path: Path) -> None:
    """It may be started at the kill, and imports what it needs while the other is torn down."""
    path = tmp_path / "d.sock"
    with ending_holder(path) as holder:
        assert holder.stdin is not None
        with successor(path, meanwhile=holder.stdin.close), connect_unix(path):
            assert (tmp_path / "d.sock.lock").read_text().split() == [str(os.getpid())]


def test_a_socket_that_was_passed_in_is_kept_over_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of both daemons wait in its one queue."""
    path = tmp_path / "d.sock"
    with ending_holder(path) as holder:
        assert holder.stdin is not None
        path.unlink()
        environ = activated(path, monkeypatch)
        with successor(path, environ=environ, meanwhile=holder.stdin.close) as listener:
            assert listener.is_inherited
            with connect_unix(path):
                listener.socket.accept()[0].close()


def test_a_daemon_that_never_ends_is_told_as_one_to_try_again_after(tmp_path: Path) -> None:
    """By its code a service manager starts us again, which a second instance's forbids."""
    begun: list[None] = []
    with ending_holder(tmp_path / "d.sock") as holder:
        with pytest.raises(
            PredecessorEndingError, match=f"process {holder.pid} is ending, and after"
        ) as told:
            successor(
                tmp_path / "d.sock", meanwhile=lambda: begun.append(None), patience_s=3 * RETRY_S
            )
        assert told.value.exit_code is ExitCode.BUSY
        assert len(begun) == 1


def test_a_daemon_that_lives_is_not_waited_for(tmp_path: Path) -> None:
    """Neither is anything imported beside it."""
    with (
        open_listener(tmp_path / "d.sock", environ={}),
        pytest.raises(EnvironmentUnsupportedError, match=f"process {os.getpid()} listens on"),
    ):
        successor(tmp_path / "d.sock", meanwhile=lambda: pytest.fail("it was waited for"))


def test_an_owner_that_is_not_seen_is_looked_for_once_more(tmp_path: Path) -> None:
    """It may have gone between two looks, or live in another PID namespace."""
    path = tmp_path / "d.sock"
    with open_listener(path, environ={}):
        (tmp_path / "d.sock.lock").write_text("4194305\n")  # no pid is as high
        with pytest.raises(EnvironmentUnsupportedError, match="process 4194305 listens on"):
            successor(path, meanwhile=lambda: pytest.fail("it was waited for"))
