"""How commands put things for people."""

from __future__ import annotations

PIPE_COLUMNS = 4096
"""Width of a table whose lines a program reads: more than any row that people would read takes."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 turn`, `2 turns`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
