"""`shared.service`: signals, states, failures and exit codes of a real process.

Each test runs a small daemon in a process of its own.  The daemon writes a line to its stdout
when it has come so far as the test wants, so nothing here waits for time to pass.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PREAMBLE = """
import asyncio, os, threading, time
from shared.errors import EnvironmentUnsupportedError
from shared.service import frame, run_daemon
from shared.service.frame import DaemonState

frame.FAILURE_DEADLINE_S = frame.EXIT_GRACE_S = 0.5  # what is waited for here never comes

def say(text):
    os.write(1, text.encode() + b"\\n")
"""
TIMEOUT_S = 30

Run = Callable[..., "Daemon"]


@dataclass
class Daemon:
    """A running daemon of one test."""

    process: subprocess.Popen[bytes]

    def wait_for(self, text: str) -> None:
        """Read its stdout up to a line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.decode().strip() == text:
                return
        pytest.fail(f"the daemon ended without saying {text!r}: {self.end()}")

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait for its end and return its exit code and its log lines."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, [json.loads(line) for line in errors.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a daemon whose app has this body."""
    processes = []

    def start(body: str, *arguments: str, **environ: str) -> Daemon:
        lines = "\n".join("    " + line for line in body.strip().splitlines())
        program = f"{PREAMBLE}\nasync def app(service):\n{lines}\nrun_daemon('prefilld', app)\n"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **{name: value for name, value in os.environ.items() if "KVPAIR" not in name},
                "KVPAIR_SOCKET": str(tmp_path / "run" / "prefilld.sock"),
                **environ,
            },
        )
        processes.append(process)
        return Daemon(process)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < limit_s


def events(lines: list[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


SERVE = """
service.set_state(DaemonState.SERVING)
say("serving")
await service.draining.wait()
say("draining")
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_drains_and_ends_with_zero(run: Run, signum: signal.Signals) -> None:
    daemon = run(SERVE)
    daemon.wait_for("serving")
    daemon.process.send_signal(signum)
    daemon.wait_for("draining")
    code, lines = daemon.end()
    assert code == 0
    assert events(lines) == [
        "daemon.started",
        "state.entered",
        "drain.started",
        "state.entered",
        "daemon.stopped",
    ]
    assert lines[2]["reason"] == signum.name


def test_a_second_signal_ends_the_drain_at_once(run: Run) -> None:
    """Whoever asks twice does not want to wait for streams."""
    daemon = run(SERVE + "await asyncio.Event().wait()")
    daemon.wait_for("serving")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("draining")
    daemon.process.send_signal(signal.SIGTERM)
    code, lines = daemon.end()
    assert code == 128 + signal.SIGTERM
    assert events(lines)[-1] == "drain.interrupted"


def test_a_drain_ends_at_its_deadline(run: Run) -> None:
    """The app's `finally` still runs, so that sockets go away with their daemon."""
    body = SERVE + "try:\n    await asyncio.Event().wait()\nfinally:\n    say('cleaned')"
    daemon = run(body, "--set", "limits.drain_timeout_s=0.01")
    daemon.wait_for("serving")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("cleaned")
    code, lines = daemon.end()
    assert code == 0
    assert "drain.expired" in events(lines)


def test_a_signal_while_loading_does_not_wait(run: Run) -> None:
    """Nothing was begun, so there is nothing to finish."""
    daemon = run("say('loading')\nawait asyncio.Event().wait()")
    daemon.wait_for("loading")
    with within(10):
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.end()[0] == 0


def test_a_hangup_reads_the_configuration_again(run: Run, tmp_path: Path) -> None:
    """What a serving daemon can take is taken; the rest is named and waits for a restart."""
    file = tmp_path / "kvpair.toml"
    file.write_text("[limits]\ndrain_timeout_s = 1\n")
    daemon = run(SERVE + "say(f'{service.config.limits.drain_timeout_s:g}')", "--config", str(file))
    daemon.wait_for("serving")
    file.write_text("[limits]\ndrain_timeout_s = 7\n[pool]\nnum_blocks = 9\n[log]\nlevel = 'info'")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("7")
    code, lines = daemon.end()
    assert code == 0
    (done,) = [line for line in lines if line["event"] == "reload.done"]
    assert done["changed"] == {"limits.drain_timeout_s": 7}
    (rest,) = [line for line in lines if line["event"] == "reload.needs-restart"]
    assert rest["keys"] == ["pool.num_blocks"]


def test_a_hangup_over_a_broken_file_changes_nothing(run: Run, tmp_path: Path) -> None:
    """Whoever edits it makes mistakes; the daemon goes on with what it has."""
    file = tmp_path / "kvpair.toml"
    file.write_text("")
    daemon = run(SERVE, "--config", str(file))
    daemon.wait_for("serving")
    file.write_text("[limits]\ndrain_timeout_s = 'soon'\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.process.send_signal(signal.SIGTERM)
    code, lines = daemon.end()
    assert code == 0
    (refused,) = [line for line in lines if line["event"] == "reload.refused"]
    assert "limits.drain_timeout_s = 'soon'" in refused["error"]
    assert "exception" not in refused


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('the fault')",
        "async def work():\n    raise ValueError('the fault')\n"
        "service.spawn(work(), name='work')\nawait asyncio.Event().wait()",
        "def work():\n    try:\n        int('the fault')\n"
        "    except ValueError as error:\n        service.fatal(error)\n"
        "threading.Thread(target=work).start()\nawait asyncio.Event().wait()",
        "asyncio.get_running_loop().call_soon(lambda: int('the fault'))\n"
        "await asyncio.Event().wait()",
    ],
    ids=["app", "task", "thread", "callback"],
)
def test_a_failure_anywhere_ends_the_daemon_with_one(run: Run, body: str) -> None:
    """A daemon that lives on with half of itself dead answers nobody and is never restarted."""
    with within(10):
        code, lines = run(body).end()
    assert code == 1
    (failed,) = [line for line in lines if line["event"] == "daemon.failed"]
    assert "the fault" in failed["exception"]
    assert "Traceback" in failed["exception"]


@pytest.mark.parametrize(
    ("status", "meaning"), [(719, "a kernel failed"), (2, "the GPU's memory is full")]
)
def test_a_gpu_that_is_lost_or_full_ends_the_daemon_by_its_name(
    run: Run, status: int, meaning: str
) -> None:
    """What a library says of it sends its reader after that library; the status is the GPU's."""
    body = (
        "from shared.engine.thread import EngineThread\n"
        "engine = EngineThread(num_threads=1)\n"
        f"class Foreign(RuntimeError):\n    error_code = {status}\n"
        "def step():\n    raise Foreign('set CUDA_LAUNCH_BLOCKING')\n"
        "service.spawn(engine.run(step), name='decode')\nawait asyncio.Event().wait()"
    )
    with within(10):
        code, lines = run(body).end()
    assert code == 1, "which its supervisor restarts"
    (failed,) = [line for line in lines if line["event"] == "daemon.failed"]
    assert failed["error"] == f"the engine failed with CUDA error {status}: {meaning}"
    assert "CUDA_LAUNCH_BLOCKING" in failed["exception"]


@pytest.mark.parametrize(
    "body",
    [
        "threading.Thread(target=threading.Event().wait).start()\nraise ValueError('the fault')",
        "threading.Timer(0, lambda: service.fatal(ValueError('the fault'))).start()\n"
        "threading.Event().wait()",
    ],
    ids=["engine-thread", "loop"],
)
def test_a_failure_ends_the_daemon_though_something_hangs(run: Run, body: str) -> None:
    """A thread inside a hung kernel launch cannot be joined, a blocked loop not be woken."""
    with within(10):
        code, lines = run(body).end()
    assert code == 1
    assert "daemon.failed" in events(lines)


def test_a_clean_end_does_not_wait_for_a_thread_that_hangs(run: Run) -> None:
    daemon = run("threading.Thread(target=threading.Event().wait).start()\n" + SERVE)
    daemon.wait_for("serving")
    with within(10):
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.end()[0] == 0


def test_an_app_that_ends_by_itself_has_failed(run: Run) -> None:
    code, lines = run("return").end()
    assert code == 1
    assert "ended without being told to" in lines[-2]["exception"]


def test_a_refusal_is_one_line_with_its_own_exit_code(run: Run) -> None:
    """A missing driver is the user's to mend: a traceback would hide the one line that helps."""
    code, lines = run("raise EnvironmentUnsupportedError('no driver', hint='install it')").end()
    assert code == 78
    (refused,) = [line for line in lines if line["level"] == "error"]
    assert refused["event"] == "daemon.refused"
    assert refused["error"] == "no driver; install it"
    assert "exception" not in refused


def test_a_socket_in_other_hands_is_a_refusal(run: Run) -> None:
    """Restarting cannot help a second instance, and 78 tells the service manager so."""
    body = """
from protocol.errors import AddressInUseError
raise AddressInUseError(path="/p.sock", pid=7)
"""
    code, lines = run(body).end()
    assert code == 78
    assert lines[-2]["error"].startswith("process 7 listens on /p.sock already")


@pytest.mark.parametrize(
    ("arguments", "environ", "text", "code"),
    [
        (["--set", "pool.num_blokcs=3"], {}, "unknown key 'pool.num_blokcs'", 78),
        (["--set", "pool.num_blocks"], {}, "expected section.key=value", 2),
        (["--config", "/nonexistent.toml"], {}, "cannot read the configuration", 78),
        (["--no-such-flag"], {}, "No such option", 2),
        ([], {"KVPAIR_LOG_LEVEL": "loud"}, "log.level = 'loud' (env KVPAIR_LOG_LEVEL)", 78),
        ([], {"KVPAIR_SOCKET": "/nonexistent/x/p.sock"}, "cannot make the socket folder", 78),
    ],
)
def test_a_wrong_configuration_is_one_line_before_anything_starts(
    run: Run, arguments: list[str], environ: dict[str, str], text: str, code: int
) -> None:
    daemon = run("say('started')", *arguments, **environ)
    output, errors = daemon.process.communicate(timeout=TIMEOUT_S)
    assert daemon.process.returncode == code
    assert text in errors.decode()
    assert output == b""
    if code == 78:
        assert errors.decode().startswith("prefilld: ")
        assert errors.count(b"\n") == 1


def test_the_service_manager_hears_ready_and_stopping(run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT_S)
        body = "service.set_state(DaemonState.WAITING)\n" + SERVE
        daemon = run("say(str('NOTIFY_SOCKET' in os.environ))\n" + body,
                     NOTIFY_SOCKET=str(tmp_path / "notify"))  # fmt: skip
        daemon.wait_for("False")
        daemon.wait_for("serving")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.end()[0] == 0
        manager.setblocking(False)
        received = []
        with suppress(BlockingIOError):
            while True:
                received.append(manager.recv(4096))
    *received, stopping, last = received
    loading = (b"STATUS=loading", b"EXTEND_TIMEOUT_USEC=")
    # prefilld is ready once it serves: alone it could answer nobody.
    assert [told for told in received if not told.startswith(loading)] == [
        b"STATUS=waiting for decoded",
        b"READY=1",
        b"STATUS=serving no requests",
    ]
    assert stopping.startswith(b"STOPPING=1\nEXTEND_TIMEOUT_USEC=44")
    assert last == b"STATUS=draining, no requests left"


def test_a_service_manager_reads_a_refusal_in_its_journals_form(run: Run, tmp_path: Path) -> None:
    """Every line in the journal is JSON, also that of a daemon which never began."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        daemon = run("pass", "--set=pool.num_blocks=none", NOTIFY_SOCKET=str(tmp_path / "notify"))
        code, (line,) = daemon.end()
        manager.setblocking(False)
        told = manager.recv(4096).decode()
    assert (code, line["event"], line["exit_code"]) == (78, "daemon.refused", 78)
    assert told == f"STATUS=refused: {line['error']}"
    assert "pool.num_blocks = 'none'" in told


def test_the_app_sees_its_configuration_and_what_both_daemons_tell(run: Run) -> None:
    body = """
import json, sys
from shared.version import __version__
status = service.status()
assert status["state"] == "loading" and status["pid"] == os.getpid()
assert status["version"] == __version__ and status["uptime_s"] >= 0
assert status["counters"] == {"kvpair_log_dropped_lines_total": 0}
assert service.config.pool.num_blocks == 7
assert service.socket_path.name == "prefilld.sock" and service.socket_path.parent.is_dir()
assert service.drain_remaining_s() == 30
assert sys.getswitchinterval() < 0.001
raise EnvironmentUnsupportedError("fine")
"""
    code, lines = run(body, "--set=pool.num_blocks=7").end()
    assert (code, lines[-2]["error"]) == (78, "fine")


@pytest.mark.parametrize("flag", ["-h", "--help", "--version"])
def test_help_and_version_start_nothing(run: Run, flag: str) -> None:
    daemon = run("say('started')", flag)
    output, errors = daemon.process.communicate(timeout=TIMEOUT_S)
    assert daemon.process.returncode == 0
    assert b"prefilld" in output
    assert errors == b""
