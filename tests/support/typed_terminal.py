"""A program in a real terminal: what it shows is read, and keys are typed."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

TIMEOUT_S = 30.0

CTRL_C, CTRL_D, UP, LEFT, ENTER = "\x03", "\x04", "\x1b[A", "\x1b[D", "\r"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


class Terminal:
    """A child that believes to be alone with a user; started where the context begins.

    Args:
        argv: Program and arguments.
        environ: Its whole environment.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._argv, self._environ = argv, {**environ, "TERM": "xterm"}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown = ""

    def __enter__(self) -> Self:
        self._keys, screen = pty.openpty()

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self._process = subprocess.Popen(
            self._argv,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=self._environ,
            preexec_fn=own_terminal,  # noqa: PLW1509 - this process has no other thread that matters
        )
        os.close(screen)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._keys)

    def type(self, keys: str) -> None:
        """Press keys."""
        self.type_bytes(keys.encode())

    def type_bytes(self, data: bytes) -> None:
        """Have the terminal send these bytes, whatever they are."""
        os.write(self._keys, data)

    def read_until(self, text: str) -> str:
        """Return what was shown up to and with `text`, without escapes; it is not shown again."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self._shown:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError(f"{text!r} did not come; shown was {self._shown!r}")
        end = self._shown.index(text) + len(text)
        before, self._shown = self._shown[:end], self._shown[end:]
        return before

    def wait(self) -> int:
        """Return the exit code; what is shown until then is read."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._read(max(0.0, deadline_s - time.monotonic())):
            pass
        return self._process.wait(timeout=TIMEOUT_S)

    @property
    def unread(self) -> str:
        """What was shown and not read."""
        return self._shown

    def _read(self, timeout_s: float) -> bool:
        """Read what is there within a time; return whether there may be more."""
        if not select.select([self._keys], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._keys, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self._shown = _ESCAPES.sub("", self._shown + self._decoder.decode(data))
        return bool(data)
