"""What commands that show an answer have in common: text on stdout, and Ctrl-C that stops it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import FrameType


def show(text: str) -> None:
    """Write to stdout now; a locale that lacks a character gets a question mark."""
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


class Cancellable(Protocol):
    """What can be told, from a signal's handler, that no more is wanted."""

    def cancel(self) -> object:
        """Have it end soon."""


@dataclass(slots=True)
class Interrupt:
    """Whether the user has had enough."""

    was_seen: bool = False


@contextmanager
def cancelled_by_interrupt(running: Cancellable, interrupt: Interrupt) -> Iterator[None]:
    """Let the first Ctrl-C cancel what runs, and the second one raise KeyboardInterrupt.

    It is cancelled from the handler itself: raising in the middle of a read could lose what had
    arrived.
    """

    def on_interrupt(_signum: int, _frame: FrameType | None) -> None:
        if interrupt.was_seen:
            raise KeyboardInterrupt
        interrupt.was_seen = True
        running.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
