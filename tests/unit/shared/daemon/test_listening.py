"""A daemon's socket: alone, or an error that the user can mend."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from protocol.unix import connect_unix
from shared.daemon.listening import open_listener
from shared.errors import ConfigError, EnvironmentUnsupportedError, ExitCode


def test_a_listener_takes_connections_at_its_path(tmp_path: Path) -> None:
    with open_listener(tmp_path / "d.sock"), connect_unix(tmp_path / "d.sock"):
        pass


def test_a_second_instance_is_told_whose_the_socket_is(tmp_path: Path) -> None:
    """It ends at once instead of loading a model for minutes first."""
    with (
        open_listener(tmp_path / "d.sock"),
        pytest.raises(EnvironmentUnsupportedError, match=r"process \d+ listens on .*d\.sock"),
    ):
        open_listener(tmp_path / "d.sock")


@pytest.mark.parametrize("name", ["missing/d.sock", "x" * 120])
def test_a_path_that_can_hold_no_socket_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"lock file|exceeds the kernel's 107") as caught:
        open_listener(tmp_path / name)
    assert caught.value.exit_code is ExitCode.CONFIG


def test_a_group_owns_the_socket_that_it_may_use(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    with open_listener(tmp_path / "d.sock", group=group):
        status = (tmp_path / "d.sock").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())


def test_a_group_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-group"):
        open_listener(tmp_path / "d.sock", group="no-such-group")
