"""Runs a real pair of daemons in processes of their own, for tests that need the whole thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from protocol.client import Client
from tests.support.tiny_gguf import TinyGguf, context_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

DaemonName = Literal["prefilld", "decoded"]
DAEMONS: tuple[DaemonName, ...] = ("prefilld", "decoded")

START_TIMEOUT_S = 60.0
"""For a daemon to import torch and load its model on a machine that is busy with other tests."""

POLL_S = 0.01

SMALL: Mapping[str, object] = {
    "pool.num_blocks": 256,
    "decoded.num_blocks": 256,
    "prefilld.threads": 1,
    "decoded.threads": 1,
    "log.level": "debug",
    "limits.drain_timeout_s": 5,
}
"""Settings of a pair in tests, unless they say otherwise."""


def wait_until(condition: Callable[[], object], *, timeout_s: float = 10.0, what: str = "") -> None:
    """Poll until `condition` holds; what it watches lives in other processes and has no event."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(POLL_S)


def write_tiny_model(folder: Path, *, context_tokens: int = 4096) -> Path:
    """Write a random model of one layer that loads in no time, with a long context."""
    return TinyGguf(metadata=context_of(context_tokens)).write(folder / "tiny.gguf")


class Pair:
    """Two daemons over one configuration; a context manager that always stops them.

    Args:
        folder: An empty folder of a short path: sockets, configuration and logs go there.
        model: A model file, or a name of the catalogue.
        settings: `section.key` to value, over `SMALL`.
        start_timeout_s: For both to serve.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path | str,
        settings: Mapping[str, object] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.folder, self._start_timeout_s = folder, start_timeout_s
        self.socket = folder / "prefilld.sock"
        self.decoded_socket = folder / "decoded.sock"
        self.client = Client(self.socket, timeout_s=120)
        self.decoded_client = Client(self.decoded_socket, timeout_s=30)
        self._settings = {**SMALL, "model.path": str(model), **(settings or {})}
        self._processes: dict[DaemonName, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            for name in DAEMONS:
                self.start(name)
            self.wait_serving()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # --- processes ---------------------------------------------------------------------------

    def start(self, name: DaemonName) -> subprocess.Popen[bytes]:
        """Start a daemon and return at once."""
        flags = [f"--set={key}={_toml(value)}" for key, value in self._settings.items()]
        with self.log_path(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", name, *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self.environ,
            )
        self._processes[name] = process
        return process

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the daemons, and of a `kvpair` command that shall find them."""
        inherited = {key: value for key, value in os.environ.items() if "KVPAIR_" not in key}
        return inherited | {"KVPAIR_SOCKET": str(self.socket), "OMP_NUM_THREADS": "1"}

    def process(self, name: DaemonName) -> subprocess.Popen[bytes]:
        """Return a daemon's present process."""
        return self._processes[name]

    def signal(self, name: DaemonName, signum: int) -> None:
        """Send a signal to a daemon."""
        self._processes[name].send_signal(signum)

    def kill(self, name: DaemonName) -> None:
        """Kill a daemon with SIGKILL and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait(timeout=10)

    def restart(self, name: DaemonName) -> None:
        """Start a daemon that has ended, and wait until the pair serves."""
        self.start(name)
        self.wait_serving()

    @contextmanager
    def alone(self, name: DaemonName) -> Iterator[Self]:
        """Run one daemon, for a test that plays the other; it waits for its peer."""
        try:
            self.start(name)
            wait_until(
                lambda: self.state(name) == "waiting-for-peer",
                timeout_s=START_TIMEOUT_S,
                what=f"{name} waits for its peer",
            )
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop both daemons, by force where they do not listen."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # --- what they say -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return prefilld's STATUS."""
        return self.client.status()

    def decoded_status(self) -> dict[str, Any]:
        """Return decoded's STATUS."""
        return self.decoded_client.status()

    def state(self, name: DaemonName) -> str | None:
        """Return a daemon's state; None where it does not answer."""
        client = self.client if name == "prefilld" else self.decoded_client
        try:
            return str(client.status()["state"])
        except OSError:
            return None

    def wait_serving(self) -> None:
        """Wait until both daemons serve over a proved link."""

        def is_serving() -> bool:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}:\n{self.tail()}")
            return all(self.state(name) == "serving" for name in DAEMONS)

        wait_until(is_serving, timeout_s=self._start_timeout_s, what="the pair serves")

    def is_settled(self) -> bool:
        """Whether nothing is in flight: nobody has a block of either pool, but for the cache."""
        return all(
            pool["free"] + pool["cached"] + pool["reserved"] == pool["total"]
            for pool in (self.status()["pool"], self.decoded_status()["pool"])
        )

    def wait_settled(self, *, timeout_s: float = 5.0) -> None:
        """Wait until every block is back."""
        wait_until(self.is_settled, timeout_s=timeout_s, what="nobody has a block any more")

    def counter(self, name: DaemonName, metric: str) -> float:
        """Return a counter of a daemon; 0 where it never counted."""
        status = self.status() if name == "prefilld" else self.decoded_status()
        return float(status["counters"].get(metric, 0))

    def log_path(self, name: DaemonName) -> Path:
        """Return where a daemon's log lines go."""
        return self.folder / f"{name}.log"

    def log(self, name: DaemonName) -> list[dict[str, Any]]:
        """Return a daemon's log lines so far."""
        lines = self.log_path(name).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def tail(self, num_lines: int = 20) -> str:
        """Return the last log lines of both daemons, for a failure's message."""
        return "\n".join(
            f"--- {name}\n" + "\n".join(self.log_path(name).read_text().splitlines()[-num_lines:])
            for name in DAEMONS
            if self.log_path(name).exists()
        )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
