"""`kvpair top` over a real pair, in a real terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.pair import Pair, write_tiny_model
from tests.support.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [sys.executable, "-c", "from shared.cli.main import main; main()", "top"]
LEAVES_ALTERNATE_SCREEN = b"\x1b[?1049l"
SHOWS_CURSOR = b"\x1b[?25h"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("p")
    with Pair(folder, model=write_tiny_model(folder)) as running:
        yield running


@pytest.fixture
def terminal(pair: Pair) -> Iterator[Terminal]:
    """`kvpair top` in the smallest usual terminal."""
    command = [*COMMAND, "--interval", "0.2"]
    with Terminal(command, environ=pair.environ, columns=80, rows=24) as running:
        yield running


@pytest.fixture
def answering(pair: Pair) -> Iterator[None]:
    """Two long answers, one behind the other, for as long as the test runs."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            with pair.client.stream([5, 6, 7] * 40, max_tokens=3000, ignore_eos=True) as stream:
                for _ in stream:
                    if is_over.is_set():
                        break

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def numbers(rows: list[str], label: str) -> str:
    """Return what stands behind a label."""
    return next((row[len(label) :].strip() for row in rows if row.startswith(label)), "")


@pytest.mark.usefixtures("answering")
def test_the_screen_shows_the_pair_at_work(terminal: Terminal) -> None:
    """Rates, latencies, pools, progress and the link, all within 80 columns and 24 rows."""

    def is_alive(rows: list[str]) -> bool:
        rate = numbers(rows, "new tokens").split()
        progress = [row for row in rows if " running " in row and " of 3,000 answer" in row]
        return bool(progress) and bool(rate) and rate[0] not in ("-", "0.0")

    rows = terminal.until(is_alive)
    text = "\n".join(rows)
    assert "prefilld serving  decoded serving" in rows[0]
    assert numbers(rows, "link").startswith("open  pull  round trip")
    assert "GB/s" in numbers(rows, "link")
    assert "/" in numbers(rows, "token gap")
    assert "█" in numbers(rows, "decoded")
    assert "·" in numbers(rows, "prefilld")
    assert "waiting 0" in text
    assert "requests: 2" in text
    assert len(rows) == 24


def test_keys_pause_and_quit_and_the_terminal_is_as_before(terminal: Terminal) -> None:
    terminal.until(lambda rows: "prefilld serving" in rows[0])
    terminal.press("p")
    terminal.until(lambda rows: "paused" in rows[0])
    terminal.press("p")
    terminal.until(lambda rows: "paused" not in rows[0])
    terminal.press("\x1b")  # an arrow key begins with it
    terminal.press("q")
    assert terminal.ended() == 0
    assert LEAVES_ALTERNATE_SCREEN in terminal.written
    assert SHOWS_CURSOR in terminal.written
    assert terminal.present_modes == terminal.modes


def test_a_resized_terminal_is_used_whole(terminal: Terminal) -> None:
    terminal.until(lambda rows: "prefilld serving" in rows[0])
    terminal.resize(120, 40)
    rows = terminal.until(lambda rows: any(len(row) == 120 for row in rows))
    assert "q quits" in rows[0]


def test_being_stopped_puts_the_terminal_back(terminal: Terminal) -> None:
    terminal.until(lambda rows: "prefilld serving" in rows[0])
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
    assert LEAVES_ALTERNATE_SCREEN in terminal.written
    assert terminal.present_modes == terminal.modes


def test_ctrl_c_is_an_end_as_anywhere(terminal: Terminal) -> None:
    terminal.until(lambda rows: "prefilld serving" in rows[0])
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ended() == 130
    assert LEAVES_ALTERNATE_SCREEN in terminal.written


def test_a_pipe_gets_one_screen(pair: Pair) -> None:
    done = subprocess.run(
        [*COMMAND, "--interval", "0.1"], env=pair.environ, stdout=subprocess.PIPE, check=True
    )
    text = done.stdout.decode()
    assert text.count("prefilld serving") == 1
    assert "\x1b" not in text


def test_no_daemon_is_shown_and_told(pair: Pair) -> None:
    environ = pair.environ | {"KVPAIR_SOCKET": str(pair.folder / "none.sock")}
    done = subprocess.run(
        [*COMMAND, "--interval", "0.1"], env=environ, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 69
    assert b"prefilld: no socket at" in done.stdout
