"""`kvpair probe` against daemons that follow a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.messages import Status

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair, Peer, Script, Serve


def telling(state: str, silent_s: float | None = 0.5) -> Script:
    def script(peer: Peer) -> None:
        peer.receive()
        told = {} if silent_s is None else {"silent_s": silent_s}
        peer.send(Status(status={"state": state, **told}))

    return script


@pytest.mark.parametrize(
    ("daemon", "state", "flags", "code"),
    [
        ("prefilld", "serving", ["--ready"], 0),
        ("prefilld", "waiting-for-peer", ["--ready"], 75),
        ("prefilld", "waiting-for-peer", [], 0),
        ("prefilld", "loading", [], 0),
        ("decoded", "waiting-for-peer", ["--ready"], 0),
        ("decoded", "loading", ["--ready"], 75),
        ("decoded", "draining", ["--ready"], 75),
        ("decoded", "draining", [], 0),
    ],
)
def test_ready_and_alive_are_two_questions(
    serve: Serve, kvpair: Kvpair, daemon: str, state: str, flags: list[str], code: int
) -> None:
    """A daemon that loads must not be killed for it, and one that drains gets no new work."""
    serve(telling(state), name=daemon)
    answered, output, errors = kvpair("probe", daemon, *flags)
    assert (answered, output) == (code, "")
    assert errors == (f"kvpair: {daemon} is {state}\n" if code else "")


def test_a_daemon_whose_engine_is_stuck_does_not_work(serve: Serve, kvpair: Kvpair) -> None:
    """It answers, as its loop always will."""
    serve(telling("serving", silent_s=61))
    code, _, errors = kvpair("probe", "prefilld")
    assert code == 69
    assert errors == "kvpair: the engine of prefilld has not moved for 61 s; restart it\n"


def test_the_longest_silence_is_the_users_to_say(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling("serving", silent_s=61))
    assert kvpair("probe", "prefilld", "--max-silence=62")[0] == 0


def test_a_daemon_that_does_not_tell_is_not_believed(serve: Serve, kvpair: Kvpair) -> None:
    serve(telling("serving", silent_s=None))
    code, _, errors = kvpair("probe", "prefilld")
    assert (code, "does not tell" in errors) == (69, True)


def test_no_daemon_is_69(kvpair: Kvpair) -> None:
    code, _, errors = kvpair("probe", "decoded")
    assert (code, "no socket at" in errors) == (69, True)
