"""`shared.cli.supervisor` with shells for daemons: real processes, real signals.

The supervisor runs in a process of its own, as in `kvpair up`.  Its daemons write their pid to a
FIFO when they are up, which is what a test waits for.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TIMEOUT_S = 30

DRIVER = """
import os, sys
from pathlib import Path
from shared.cli import restarts, supervisor
from shared.cli.children import blocked_signals
from shared.cli.supervisor import Command, Daemon, PairFailedError, Supervisor

folder, first, second, start_timeout_s, drain_timeout_s, kill_grace_s, silence_s, *command = (
    sys.argv[1:]
)
supervisor.KILL_GRACE_S = float(kill_grace_s)
supervisor.SILENCE_S = float(silence_s)
requests = Path(folder, "requests")
restarts.FIRST_DELAY_S = 0.01
say = lambda text: print("say:", text, file=sys.stderr, flush=True)
with blocked_signals() as signals:
    pair = Supervisor(
        daemons=[
            Daemon(name="first", argv=["sh", "-c", first]),
            Daemon(name="second", argv=["sh", "-c", second]),
        ],
        environ=os.environ,
        signals=signals,
        is_ready=lambda pids: set(pids) == {"first", "second"} and Path(folder, "ready").exists(),
        num_requests=lambda name: int(requests.read_text()) if requests.exists() else None,
        say=say,
        start_timeout_s=float(start_timeout_s),
        drain_timeout_s=float(drain_timeout_s),
    )
    try:
        code = pair.run(Command(argv=command, environ=os.environ) if command else None)
    except PairFailedError as error:
        say(error)
        code = error.code
print("ended", flush=True)
sys.exit(code)
"""

SERVE = "echo $$ > up; exec tail -f /dev/null"
"""Says that it is up, and ends on SIGTERM."""

WHEN_TOLD = "[ -p go ] && { cat go; rm go; }; "
"""Waits, the first time, until the test writes to `go`: the other daemon is up then."""


def handling_sigterm(action: str) -> str:
    """Return a shell command that says that it is up, and does this at each SIGTERM."""
    program = (
        "import os, pathlib, signal, sys\n"
        "say = pathlib.Path('up').write_text\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {action})\n"
        "say(f'{os.getpid()}\\n')\n"
        "while True: signal.pause()\n"
    )
    return shlex.join(["exec", sys.executable, "-c", program])


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "up")
    os.mkfifo(tmp_path / "go")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    processes = []

    def run(
        *command: str,
        first: str = SERVE,
        second: str = SERVE,
        start_timeout_s: float = 30,
        drain_timeout_s: float = 30,
        kill_grace_s: float = 5,
        silence_s: float = 30,
    ) -> subprocess.Popen[str]:
        limits = map(str, (start_timeout_s, drain_timeout_s, kill_grace_s, silence_s))
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), first, second, *limits, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        with process:
            process.kill()


def pids(folder: Path, count: int) -> list[int]:
    """Wait until so many daemons have said their pids."""
    found: list[int] = []
    while len(found) < count:
        found += map(int, (folder / "up").read_text().split())
    return found


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_a_signal_stops_the_pair_and_leaves_no_orphan(
    start: Start, folder: Path, signum: signal.Signals, code: int
) -> None:
    process = start()
    daemons = pids(folder, 2)
    process.send_signal(signum)
    assert end(process) == (code, "ended\n", "")
    assert all(map(is_gone, daemons))


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_a_commands_status_is_the_exit_code(
    start: Start, folder: Path, script: str, code: int
) -> None:
    process = start("sh", "-c", f"echo answer; {script}")
    daemons = pids(folder, 2)
    (folder / "ready").touch()
    assert end(process) == (code, "answer\nended\n", "")
    assert all(map(is_gone, daemons))


def test_a_command_waits_for_the_pair(start: Start, folder: Path) -> None:
    """A command that ran before the link is proved would only see an error."""
    process = start("sh", "-c", "test -e ready && echo served")
    pids(folder, 2)
    (folder / "ready").touch()
    assert end(process) == (0, "served\nended\n", "")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_was_never_run_is_not_told_as_done(
    start: Start, folder: Path, signum: signal.Signals, code: int
) -> None:
    """A signal that comes while the pair loads."""
    process = start("echo", "ran")
    pids(folder, 2)
    process.send_signal(signum)
    assert end(process)[:2] == (code, "ended\n")


def test_a_pair_that_never_serves_is_given_up(start: Start, folder: Path) -> None:
    process = start("true", start_timeout_s=1)
    daemons = pids(folder, 2)
    code, _, errors = end(process)
    assert code == 1
    assert "say: the pair did not serve within 1 s; its log is above" in errors
    assert all(map(is_gone, daemons))


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["/no/such/program"], 127, "cannot run /no/such/program: No such file or directory"),
        (["/"], 126, "cannot run /: Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_is_named(
    start: Start, folder: Path, argv: list[str], code: int, text: str
) -> None:
    process = start(*argv)
    pids(folder, 2)
    (folder / "ready").touch()
    assert end(process) == (code, "ended\n", f"say: {text}\n")


def test_a_daemon_that_dies_is_started_again(start: Start, folder: Path) -> None:
    process = start()
    first, second = pids(folder, 2)
    os.kill(first, signal.SIGKILL)
    (third,) = pids(folder, 1)
    assert not is_gone(second)
    process.send_signal(signal.SIGTERM)
    code, _, errors = end(process)
    assert code == 0
    assert "was ended by SIGKILL; starting it again in 0.01 s" in errors
    assert is_gone(third)


def test_a_daemon_that_always_dies_ends_the_pair(start: Start, folder: Path) -> None:
    """Five deaths within a minute; what it logs tells why."""
    process = start(second=WHEN_TOLD + "exit 3")
    daemons = pids(folder, 1)
    (folder / "go").write_text("")
    code, _, errors = end(process)
    assert code == 1
    assert errors.splitlines() == [
        *(
            f"say: second exited with 3; starting it again in {s} s"
            for s in (0.01, 0.02, 0.04, 0.08)
        ),
        "say: second exited with 3 and died too often to be started again",
    ]
    assert all(map(is_gone, daemons))


def test_a_wrong_configuration_is_not_tried_twice(start: Start, folder: Path) -> None:
    process = start(second=WHEN_TOLD + "exit 78")
    daemons = pids(folder, 1)
    (folder / "go").write_text("")
    assert end(process) == (
        78,
        "ended\n",
        "say: second refuses to run; its last line above says why\n",
    )
    assert all(map(is_gone, daemons))


def test_a_pair_that_gives_up_ends_its_command(start: Start, folder: Path) -> None:
    """Nobody is left to answer it."""
    process = start("sh", "-c", "echo $$ > up; exec tail -f /dev/null")
    running = pids(folder, 2)
    (folder / "ready").touch()
    running += pids(folder, 1)
    for _ in range(4):
        os.kill(running[0], signal.SIGKILL)
        running[0:1] = pids(folder, 1)
    os.kill(running[0], signal.SIGKILL)
    code, _, errors = end(process)
    assert code == 1
    assert "died too often" in errors
    assert all(map(is_gone, running))


def test_a_signal_goes_on_to_the_command(start: Start, folder: Path) -> None:
    """The command decides what it means; its status is still the exit code."""
    process = start("sh", "-c", handling_sigterm("sys.exit(9)"))
    pids(folder, 2)
    (folder / "ready").touch()
    pids(folder, 1)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (9, "ended\n", "")


def test_a_daemon_that_does_not_stop_is_killed(start: Start, folder: Path) -> None:
    """Its own time to drain is over, so nothing is lost that it still meant to save."""
    process = start(first=handling_sigterm("None"), drain_timeout_s=0, kill_grace_s=0.1)
    daemons = pids(folder, 2)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0
    assert all(map(is_gone, daemons))


@pytest.mark.parametrize(
    ("num_requests", "said"),
    [
        ("2", "first may finish 2 running requests, for at most 30 s; Ctrl-C ends it at once"),
        ("1", "first may finish 1 running request, for at most"),
        ("0", "first is ending, for at most"),
        (None, "first is ending, for at most"),
    ],
)
def test_an_end_that_takes_long_says_what_it_waits_for(
    start: Start, folder: Path, num_requests: str | None, said: str
) -> None:
    """Answers that do not run are none to wait for."""
    if num_requests is not None:
        (folder / "requests").write_text(num_requests)
    process = start(
        first=handling_sigterm("None"), drain_timeout_s=30, kill_grace_s=0.1, silence_s=0.05
    )
    pids(folder, 2)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert said in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0


def test_a_second_signal_does_not_wait_for_the_drain(start: Start, folder: Path) -> None:
    slow = handling_sigterm("say('draining\\n')")
    process = start(first=slow, drain_timeout_s=3600, kill_grace_s=1)
    daemons = pids(folder, 2)
    process.send_signal(signal.SIGTERM)
    assert (folder / "up").read_text() == "draining\n"
    process.send_signal(signal.SIGTERM)
    assert (folder / "up").read_text() == "draining\n", "the daemon has it as well"
    assert end(process)[0] == 0
    assert all(map(is_gone, daemons))


def test_the_pair_dies_with_a_supervisor_that_was_killed(start: Start, folder: Path) -> None:
    """SIGKILL leaves no chance to tidy up, so the kernel does."""
    process = start()
    daemons = pids(folder, 2)
    watches = [os.pidfd_open(pid) for pid in daemons]
    process.kill()
    for watch in watches:
        with open(watch) as ending:
            assert _ends(ending.fileno())


def _ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(TIMEOUT_S * 1000))
