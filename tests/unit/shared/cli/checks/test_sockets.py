"""`shared.cli.checks.sockets`: folders, groups, daemons that answer, and pairs that do not fit."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from protocol.messages import Status
from shared.cli.checks.finding import Verdict
from shared.cli.checks.sockets import Answer, check_daemon, check_folder, check_pair

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Peer, Serve


def answer(pid: int = 1, **status: Any) -> Answer:  # noqa: ANN401 - whatever STATUS tells
    told = {"state": "serving", "version": "1", "pid": pid, "fingerprint": "f"} | status
    return Answer(status=told, pid=pid)


def test_a_folder_of_ones_own_is_well(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    finding = check_folder("prefilld", tmp_path / "prefilld.sock", None)
    assert finding.verdict is Verdict.OK
    assert "its user and root only" in finding.text


def test_a_folder_that_will_be_made_is_well(tmp_path: Path) -> None:
    finding = check_folder("prefilld", tmp_path / "new" / "prefilld.sock", "root")
    assert (finding.verdict, "will be made" in finding.text) == (Verdict.OK, True)
    assert "members of root as well" in finding.text


def test_a_folder_that_everybody_may_write_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    finding = check_folder("decoded", tmp_path / "decoded.sock", None)
    assert finding.verdict is Verdict.FAIL
    assert "may be written by everybody" in finding.text


def test_a_group_that_does_not_exist_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    finding = check_folder("decoded", tmp_path / "decoded.sock", "no-such-group")
    assert finding.verdict is Verdict.FAIL
    assert finding.cure == "groupadd --system no-such-group"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    finding = check_folder("decoded", tmp_path / "a" / "b" / "decoded.sock", None)
    assert finding.verdict is Verdict.FAIL
    assert "KVPAIR_SOCKET" in (finding.cure or "")


def test_a_daemon_that_is_not_running_is_no_fault(tmp_path: Path) -> None:
    """Whoever installs asks before anything runs."""
    finding, told = check_daemon("prefilld", tmp_path / "prefilld.sock")
    assert (finding.verdict, told) == (Verdict.OK, None)
    assert "kvpair up, or systemctl start" in finding.text


def test_a_socket_that_was_left_behind_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prefilld.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    finding, told = check_daemon("prefilld", path)
    assert (finding.verdict, told) == (Verdict.WARN, None)


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        ("serving", Verdict.OK),
        ("loading", Verdict.WARN),
        ("waiting-for-peer", Verdict.WARN),
        ("draining", Verdict.WARN),
    ],
)
def test_a_daemon_says_how_it_is(
    serve: Serve, socket_path: Path, state: str, verdict: Verdict
) -> None:
    def script(peer: Peer) -> None:
        if peer.receive() is not None:  # the first connection only asks who is there
            peer.send(Status(status={"state": state, "version": "1", "pid": 5}))

    serve(script)
    finding, told = check_daemon("prefilld", socket_path)
    assert finding.verdict is verdict
    assert f"is {state} (version 1, pid 5)" in finding.text
    assert told is not None
    assert told.pid == os.getpid()


def test_a_daemon_that_speaks_something_else_is_told(serve: Serve, socket_path: Path) -> None:
    def script(peer: Peer) -> None:
        if peer.receive() is not None:
            peer.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    serve(script)
    finding, told = check_daemon("prefilld", socket_path)
    assert (finding.verdict, told) == (Verdict.FAIL, None)
    assert "not as expected" in finding.text


@pytest.mark.parametrize("key", ["version", "fingerprint"])
def test_daemons_that_do_not_fit_are_told(key: str) -> None:
    (finding,) = check_pair(answer(**{key: "a"}), answer(**{key: "b"}))
    assert finding.verdict is Verdict.FAIL
    assert f"prefilld has {key} a, decoded b" in finding.text


def test_an_open_link_is_well_and_pids_are_compared() -> None:
    link = {"state": "open", "access": "pull", "rtt_us": 50}
    (finding,) = check_pair(answer(link=link), answer())
    assert (finding.check, finding.verdict) == ("link", Verdict.OK)
    hidden = Answer(status={"pid": 7, "state": "serving"}, pid=0)
    findings = check_pair(answer(link=link), hidden)
    assert findings[-1].verdict is Verdict.WARN
    assert findings[-1].text.startswith("decoded lives in another one")


def test_half_a_pair_is_compared_with_nothing() -> None:
    assert check_pair(answer(), None) == []
    assert check_pair(None, answer()) == []
