"""The worker's side of the conversation, over a real socket and in a real process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.model.template_worker import receive_map, send_map

SETUP = {
    "source": "{{ messages[0].content }}",
    "variables": {},
    "max_render_s": 5.0,
    "max_memory_bytes": 512 << 20,
    "max_characters": 100,
}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def worker() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        command = [sys.executable, "-P", "-m", "shared.model.template_worker"]
        process = subprocess.Popen(command, stdin=theirs.fileno())
        theirs.close()
        yield ours, process
        ours.close()
        process.wait(30)


def ask(connection: socket.socket, content: str) -> dict[str, str] | None:
    message = {"role": "user", "content": content}
    send_map(connection, {"messages": [message], "add_generation_prompt": True})
    return receive_map(connection)


def test_maps_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """One after the other, however the kernel cuts the stream."""
    ours, theirs = pair
    send_map(ours, {"text": "x" * 10_000})
    send_map(ours, {"n": 1})
    assert receive_map(theirs) == {"text": "x" * 10_000}
    assert receive_map(theirs) == {"n": 1}


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x00\x05abc"])
def test_an_end_anywhere_is_the_end(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    """A killed process leaves half a map behind."""
    ours, theirs = pair
    ours.sendall(sent)
    ours.close()
    assert receive_map(theirs) is None


def test_it_renders_as_often_as_asked(
    worker: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    """Starting a process costs a hundred renders."""
    connection, _ = worker
    send_map(connection, SETUP)
    assert receive_map(connection) == {"text": ""}
    assert ask(connection, "one") == {"text": "one"}
    assert ask(connection, "x" * 101) == {"error": "the output is longer than 100 characters"}
    assert ask(connection, "two") == {"text": "two"}


def test_it_ends_with_its_daemon(worker: tuple[socket.socket, subprocess.Popen[bytes]]) -> None:
    """The closed socket is the only sign that a killed daemon gives."""
    connection, process = worker
    send_map(connection, SETUP)
    receive_map(connection)
    connection.close()
    assert process.wait(30) == 0


def test_it_outlives_the_signals_that_only_its_daemon_should_heed(
    worker: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    """Ctrl-C and a stop reach the whole group, and the daemon may want it while it drains."""
    connection, process = worker
    send_map(connection, SETUP)
    receive_map(connection)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert ask(connection, "still here") == {"text": "still here"}


def test_the_timer_kills_without_anybody_s_help(
    worker: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    """So a worker whose daemon was killed in mid-render does not spin for ever."""
    connection, process = worker
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    send_map(connection, SETUP | {"source": endless, "max_render_s": 0.05})
    assert receive_map(connection) == {"text": ""}
    assert ask(connection, "x") is None
    assert process.wait(30) == -signal.SIGALRM
