"""Workers as a test sees them: started early, since importing takes seconds, and killed surely."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

ANSWER_TIMEOUT_S = 60.0
"""A step takes milliseconds; one that takes this long hangs."""


class WorkerError(Exception):
    """A step raised; `kind` is the exception's name over there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Process:
    """A worker process.  It starts importing at once, and `do` waits for that.

    Args:
        environ: What its environment has besides this one's.
        prefix: A command in front of Python, such as `unshare`.
    """

    def __init__(
        self, *, environ: Mapping[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.gpu.ipc.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environ or {})},
            )
        self._link = Connection(ours.detach())
        self._is_ready = False

    def do(self, step: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Run a step over there, and return what it returns.

        Raises:
            WorkerError: It raised.
            TimeoutError: It hangs.
            EOFError: The process died.
        """
        self.tell(step, *arguments, **options)
        return self.answer()

    def tell(self, step: str, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Begin a step; `answer` returns its result."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        self._link.send((step, arguments, options))

    def answer(self) -> Any:  # noqa: ANN401 - whatever the step returns
        is_right, value = self._receive()
        if not is_right:
            raise WorkerError(*value)
        return value

    def kill(self) -> None:
        """SIGKILL; returns when the process is reaped."""
        self._process.kill()
        self._process.wait()
        self._link.close()

    def _receive(self) -> Any:  # noqa: ANN401 - as above
        if not self._link.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("a worker does not answer")
        return self._link.recv()
