"""A daemon that follows a script, behind a real socket and the real protocol."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.connection import Connection
from protocol.messages import Message
from protocol.states import Role

TIMEOUT_S = 30.0


class Peer:
    """One accepted connection, as the daemon's script sees it."""

    def __init__(self, sock: socket.socket, role: Role) -> None:
        self.sock = sock
        self._connection = Connection(role)
        sock.settimeout(TIMEOUT_S)

    def receive(self) -> Message | None:
        """Return the client's next message; None where it hung up."""
        while (message := self._connection.next_event()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._connection.receive_data(data)
        return message

    def send(self, *messages: Message) -> None:
        """Send messages."""
        for message in messages:
            self.sock.sendall(self._connection.send(message))


Script = Callable[[Peer], None]


class ScriptedDaemon:
    """Listens at a path and runs the script for each connection, one after the other."""

    def __init__(self, path: Path, script: Script, role: Role) -> None:
        self._script, self._role = script, role
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            with sock:
                self._script(Peer(sock, self._role))

    def stop_listening(self) -> None:
        """Take no more connections; the script that runs goes on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Stop listening; the script that runs is waited for."""
        self.stop_listening()
        self._thread.join(TIMEOUT_S)


Serve = Callable[..., ScriptedDaemon]


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    """Where prefilld would listen."""
    return tmp_path / "prefilld.sock"


@pytest.fixture
def serve(socket_path: Path) -> Iterator[Serve]:
    """Start a scripted daemon: `serve(script)`, or `serve(script, name="decoded")`."""
    daemons = []

    def start(script: Script, *, name: str = "prefilld") -> ScriptedDaemon:
        role = Role.PREFILLD_CLIENT if name == "prefilld" else Role.DECODED_CLIENT
        daemon = ScriptedDaemon(socket_path.with_name(f"{name}.sock"), script, role)
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        daemon.close()


class Kvpair:
    """Runs the command in a process of its own, as a user does."""

    def __init__(self, socket_path: Path) -> None:
        self.environ = {
            **{name: value for name, value in os.environ.items() if "KVPAIR" not in name},
            "KVPAIR_SOCKET": str(socket_path),
            "COLUMNS": "80",
        }

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start it; its three streams are pipes."""
        return subprocess.Popen(
            [sys.executable, "-c", "from shared.cli.main import main; main()", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            env={**self.environ, **environ},
        )

    def __call__(
        self, *arguments: str, text: str | None = None, **environ: str
    ) -> tuple[int, str, str]:
        """Run it to its end; return exit code, stdout and stderr."""
        with self.start(*arguments, **environ) as process:
            output, errors = process.communicate(text, timeout=TIMEOUT_S)
        return process.returncode, output, errors


@pytest.fixture
def kvpair(socket_path: Path) -> Kvpair:
    """Run `kvpair` against the test's socket."""
    return Kvpair(socket_path)
