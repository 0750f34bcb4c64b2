"""Socket activation: what a service manager passed, or a clear word about what it did not."""

from __future__ import annotations

import os
import socket

import pytest

from shared.daemon.activation import take_activated
from shared.errors import ConfigError

NAMES = {"LISTEN_FDNAMES": "prefilld.socket"}


def environ(count: str = "1", pid: int | None = None) -> dict[str, str]:
    return {"LISTEN_FDS": count, "LISTEN_PID": str(pid or os.getpid()), "HOME": "/", **NAMES}


def test_without_a_service_manager_there_is_no_socket() -> None:
    assert take_activated({}) is None


def test_the_socket_is_closed_on_exec_and_gone_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child must neither hold it open nor believe it its own."""
    passed = socket.socket(socket.AF_UNIX)
    passed.set_inheritable(True)
    monkeypatch.setattr("shared.daemon.activation.FIRST_FD", passed.fileno())
    variables = environ()
    taken = take_activated(variables)
    assert taken is not None
    assert taken.fileno() == passed.detach()
    with taken:
        assert not taken.get_inheritable()
    assert variables == {"HOME": "/"}


def test_sockets_for_another_process_are_an_error() -> None:
    """A script around the daemon got them; listening on our own would hide that."""
    with pytest.raises(ConfigError, match="for process 1 instead of this one"):
        take_activated(environ(pid=1))


@pytest.mark.parametrize("count", ["0", "2", "many"])
def test_any_other_number_than_one_is_an_error(count: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{count} sockets were passed in \(prefilld.socket\)"):
        take_activated(environ(count))


def test_a_descriptor_that_is_no_socket_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "rb") as null:
        monkeypatch.setattr("shared.daemon.activation.FIRST_FD", null.fileno())
        with pytest.raises(ConfigError, match=r"passed in as prefilld\.socket, is none"):
            take_activated(environ())
