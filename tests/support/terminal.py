"""A real terminal around a program: what it draws is seen as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Self

import pyte

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DEADLINE_S = 60.0


class Terminal:
    """Runs a program on a pseudo-terminal of its own, and keeps the screen.

    Args:
        command: What to run.
        environ: Its environment.
        columns: Width of the terminal.
        rows: Height.
    """

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], columns: int, rows: int
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.written = bytearray()
        """Everything that the program wrote."""
        self._leader, self._terminal = pty.openpty()
        self._set_size(columns, rows)
        self.modes = termios.tcgetattr(self._terminal)
        """How the terminal was before the program had it."""
        self.process = subprocess.Popen(
            command,
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env={**environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._leader)

    @property
    def rows(self) -> list[str]:
        """The screen as it stands."""
        return [row.rstrip() for row in self._screen.display]

    @property
    def present_modes(self) -> list[object]:
        """How the terminal is now."""
        return termios.tcgetattr(self._terminal)

    def until(self, condition: Callable[[list[str]], object]) -> list[str]:
        """Wait until the screen is as asked for, and return it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition(self.rows):
            shown = "\n".join(self.rows)
            assert time.monotonic() < deadline_s, f"the screen never came:\n{shown}"
            if select.select([self._leader], [], [], 0.1)[0]:
                data = os.read(self._leader, 1 << 16)
                self.written += data
                self._stream.feed(data)
        return self.rows

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self._leader, key.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size, as dragging a window's corner does."""
        self._screen.resize(rows, columns)
        self._set_size(columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def ended(self) -> int:
        """Wait for the program's end; return its exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, "the program does not end"
            self._drain(0.05)
        self._drain(0)
        return self.process.returncode

    def _drain(self, timeout_s: float) -> None:
        while select.select([self._leader], [], [], timeout_s)[0]:
            data = os.read(self._leader, 1 << 16)
            self.written += data
            self._stream.feed(data)

    def _set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)
