"""Many prompts at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from protocol.errors import UnixSocketError
from protocol.messages import Accepted, End, Error, Generate, Timings, Tokens, Usage
from shared.cli.prompt_file import PromptLine
from shared.cli.prompt_runner import MAX_ATTEMPTS, MAX_RETRY_S, PromptRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Peer, Serve

ACCEPTED = Accepted(id="r1", seed=7, prompt_tokens=3, cached_tokens=0, fingerprint="f")
END = End(
    reason="stop",
    usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1),
    timings_ms=Timings(queue=0, prefill=0, decode=0, total=0),
)


def lines(num_lines: int) -> Iterator[PromptLine]:
    return (PromptLine(number=n, data=b'"%d"' % n) for n in range(1, num_lines + 1))


def test_lines_are_taken_as_there_is_room(serve: Serve, socket_path: Path) -> None:
    """A file of a million lines must not be in memory to answer its first."""
    taken: list[int] = []

    def counted() -> Iterator[PromptLine]:
        for line in lines(50):
            taken.append(line.number)
            yield line

    def script(peer: Peer) -> None:
        assert isinstance(peer.receive(), Generate)
        peer.send(ACCEPTED, Tokens(index=0, ids=[1], text="x"), END)

    serve(script)
    runner = PromptRunner(Client(socket_path), {}, concurrency=2)
    for num_over, result in enumerate(runner.run(counted()), start=1):
        assert result.fault is None
        assert len(taken) <= num_over + 3
    assert len(taken) == 50


def test_a_daemon_that_stays_full_is_given_up(serve: Serve, socket_path: Path) -> None:
    """After a bounded number of attempts, each after the time it names or the longest allowed."""
    pauses: list[float] = []

    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(Error(code="busy", message="later", retryable=True, retry_after_ms=10**9))

    serve(script)
    runner = PromptRunner(Client(socket_path), {}, concurrency=1, wait=pauses.append)
    (result,) = runner.run(lines(1))
    assert result.fault == "later"
    assert pauses == [MAX_RETRY_S] * (MAX_ATTEMPTS - 1)


def test_without_a_daemon_nothing_more_is_asked(tmp_path: Path) -> None:
    runner = PromptRunner(Client(tmp_path / "none.sock"), {}, concurrency=2)
    with pytest.raises(UnixSocketError, match=r"none\.sock"):
        list(runner.run(lines(3)))


def test_threads_end_with_the_last_line(serve: Serve, socket_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, END)

    serve(script)
    before = set(threading.enumerate())
    assert len(list(PromptRunner(Client(socket_path), {}, concurrency=3).run(lines(4)))) == 4
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()
