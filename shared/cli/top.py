"""`kvpair top`: both daemons, live, on a terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from shared.cli.pair import decoded_socket
from shared.cli.parameters import FILE_NAME, Number
from shared.cli.top_readings import History, Reading, Samples
from shared.config.paths import client_socket
from shared.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from rich.console import Console
    from rich.text import Text

INTERVAL_S = 1.0

ANSWER_TIMEOUT_S = 2.0
"""A daemon that takes longer is shown as away; the next look asks again."""

QUIT_KEYS = frozenset("qQ\x04")
PAUSE_KEYS = frozenset("pP ")


@click.command
@click.option(
    "--interval",
    type=Number(min=0.1, max=3600),
    default=INTERVAL_S,
    metavar="SECONDS",
    help=f"Pause between two looks [{INTERVAL_S:g}].",
)
@click.option("--once", is_flag=True, help="Print one screen and end, as where stdout is no tty.")
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def top(*, interval: float, once: bool, socket: str | None) -> ExitCode:
    """Watch both daemons, live.

    Rates, latencies, pools, queues, and running requests with their progress.

    Keys: q quits, p pauses.
    """
    from rich.console import Console  # noqa: PLC0415  not for `--help`

    console = Console(highlight=False, emoji=False, markup=False)
    watch = _Watch(client_socket(os.environ, chosen=socket))
    if once or not console.is_terminal:
        watch.look()
        time.sleep(interval)
        watch.look()
        console.print(watch.draw(console, is_live=False), end="\n")
        return ExitCode.OK if watch.is_whole else ExitCode.NO_DAEMON
    with _ended_by_sigterm(), _keys() as fd:
        _show(watch, console, fd, interval)
    return ExitCode.OK


def _show(watch: _Watch, console: Console, fd: int | None, interval: float) -> None:
    """Look and draw until somebody quits."""
    from rich.live import Live  # noqa: PLC0415  as above

    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        due_s = time.monotonic()
        while True:
            if not watch.is_paused:
                watch.look()
            live.update(watch.draw(console, is_live=fd is not None), refresh=True)
            due_s = max(due_s + interval, time.monotonic())
            while (key := _key(fd, due_s - time.monotonic())) is not None:
                if key in QUIT_KEYS:
                    return
                if key in PAUSE_KEYS:
                    watch.is_paused = not watch.is_paused
                live.update(watch.draw(console, is_live=True), refresh=True)


class _Watch:
    """Asks both daemons, and remembers."""

    def __init__(self, prefilld_socket: Path) -> None:
        self._prefilld_socket = prefilld_socket
        self._histories = {"prefilld": History(), "decoded": History()}
        self.is_paused = False

    @property
    def is_whole(self) -> bool:
        """Whether both answered the last time."""
        return all(history.last.fault is None for history in self._histories.values())

    def look(self) -> None:
        """Ask both daemons."""
        reading = _ask(self._prefilld_socket)
        self._histories["prefilld"].add(reading)
        self._histories["decoded"].add(_ask(decoded_socket(self._prefilld_socket, reading.status)))

    def draw(self, console: Console, *, is_live: bool) -> Text:
        """Return the present screen, in the terminal's present size; `is_live` where keys do."""
        from shared.cli.top_view import Screen  # noqa: PLC0415  it imports rich

        screen = Screen(
            prefilld=self._histories["prefilld"],
            decoded=self._histories["decoded"],
            clock=time.strftime("%H:%M:%S"),
            is_paused=self.is_paused,
            is_live=is_live,
        )
        return screen.draw(console.width, console.height)


def _ask(socket: Path) -> Reading:
    try:
        client = Client(socket, connect_timeout_s=ANSWER_TIMEOUT_S, timeout_s=ANSWER_TIMEOUT_S)
        status, text = client.status(), client.metrics()
    except (ProtocolError, RequestError) as error:
        return Reading(at_s=time.monotonic(), fault=str(error))
    return Reading(at_s=time.monotonic(), status=status, samples=Samples.parse(text))


@contextmanager
def _keys() -> Iterator[int | None]:
    """Have keys arrive one by one, unseen; yields None where stdin is no terminal."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield None
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _key(fd: int | None, timeout_s: float) -> str | None:
    """Return the key that was pressed within the time, or None."""
    if fd is None:
        time.sleep(max(0.0, timeout_s))
        return None
    if not select.select([fd], [], [], max(0.0, timeout_s))[0]:
        return None
    data = os.read(fd, 1)
    return data.decode("latin-1") if data else "q"  # the terminal is gone


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind, so that the terminal is put back as it was."""

    def end(signum: int, _frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
