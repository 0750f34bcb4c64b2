"""A daemon that plays a script: real socket, real connection, one thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from protocol import messages as m
from protocol.connection import Connection
from protocol.listener import listen_unix
from protocol.states import Role


class Conversation:
    """The daemon's end of one client's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.raw = sock
        self._connection = Connection(Role.PREFILLD_CLIENT)

    def receive(self) -> m.Message | None:
        """Return the client's next message, or None when it has gone."""
        while (message := self._connection.next_event()) is None:
            data = self.raw.recv(65_536)
            if not data:
                return None
            self._connection.receive_data(data)
        return message

    def send(self, *messages: m.Message) -> None:
        for message in messages:
            self.raw.sendall(self._connection.send(message))


Script = Callable[[Conversation], None]


class ScriptedDaemon:
    """Listens at a path and plays each script to one client, in order; closes after each."""

    def __init__(self, path: Path, *scripts: Script) -> None:
        self.path = path
        self._scripts = scripts
        self._listener = listen_unix(path)
        self._listener.socket.setblocking(True)
        self._thread = threading.Thread(target=self._play)
        self.failure: BaseException | None = None

    def _play(self) -> None:
        try:
            for script in self._scripts:
                sock, _ = self._listener.socket.accept()
                with sock:
                    script(Conversation(sock))
        except BaseException as error:
            self.failure = error

    def close(self) -> None:
        """Let the last script end, and listen no more.  Idempotent."""
        self._thread.join(timeout=20)
        self._listener.close()

    def __enter__(self) -> ScriptedDaemon:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # the script may wait for a client that never came
            self._listener.socket.shutdown(socket.SHUT_RDWR)
        self.close()
        if error is None and self.failure is not None:
            raise self.failure
