"""Reads a user's lines: edited and remembered in a terminal, plain in a pipe.

In a terminal the standard library's readline edits, recalls (arrows, Ctrl-R) and takes a pasted
text as one line; what was typed is kept between sessions in the user's state folder, for the user
alone.  A line that ends with a backslash goes on in the next.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from shared.cli.interrupts import late_interrupts_seen
from shared.errors import UsageError

PROMPT, CONTINUED = "> ", "… "

MAX_HISTORY_LINES = 1000
MAX_LINE_CHARACTERS = 64 << 20
"""Longest line from a pipe, a bound on what is read before anything is judged."""


def history_path() -> Path:
    """Return where what was typed is kept."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "kvpair" / "chat_history"


class LineReader:
    """Where lines come from."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._edits = self.is_terminal and sys.stdout.isatty()
        if self._edits:
            _load_history()

    def read(self) -> str | None:
        """Return the next line without its newline; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was typed is dropped.
            UsageError: A line from a pipe is no UTF-8, or longer than any daemon takes.
        """
        line = self._read_one(PROMPT)
        if not self.is_terminal:
            return line
        while line is not None and line.endswith("\\"):
            more = self._read_one(CONTINUED)
            if more is None:
                return line
            line = f"{line[:-1]}\n{more}"
        return line

    def close(self) -> None:
        """Keep what was typed for the next session."""
        if self._edits:
            _save_history()

    def _read_one(self, prompt: str) -> str | None:
        if self.is_terminal and not self._edits:
            click.echo(prompt, nl=False, err=True)
        try:
            line = self._edited(prompt) if self._edits else sys.stdin.readline(MAX_LINE_CHARACTERS)
            line.encode()  # some locales read bytes that are no text as lone surrogates
        except UnicodeError as error:
            raise UsageError("a line on stdin is not UTF-8") from error
        if len(line) == MAX_LINE_CHARACTERS:
            raise UsageError(f"a line on stdin has more than {MAX_LINE_CHARACTERS} characters")
        return line.removesuffix("\n") if line else None

    @staticmethod
    def _edited(prompt: str) -> str:
        """Return a line with its newline; nothing at the end."""
        try:
            with late_interrupts_seen():
                return input(prompt) + "\n"
        except EOFError:
            return ""


def _load_history() -> None:
    """Make `input` edit and remember, as far as this Python can."""
    with suppress(ImportError, OSError):  # without readline or a home, lines are read all the same
        import readline  # noqa: PLC0415 - only terminals need it, and importing it is what edits

        readline.set_history_length(MAX_HISTORY_LINES)
        readline.read_history_file(history_path())


def _save_history() -> None:
    with suppress(ImportError, OSError):
        import readline  # noqa: PLC0415 - as above

        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
