"""Runs the pair in the foreground, and perhaps one command beside it, from a single thread.

daemon dies            started again after a delay, until `RestartPolicy` gives up: exit 1
daemon exits with 78   its configuration is wrong, and so it would stay: exit 78 at once
no command             run until SIGINT (exit 130), SIGTERM or SIGHUP (exit 0)
command                started once `is_ready` says so; its exit status is ours
signal                 goes on to a running command; without one it stops the pair
at the end             the command, if it still runs, and the daemons get SIGTERM; after
                       their time to drain, or a second signal, SIGKILL
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from shared.cli.children import Signal, SignalWaiter
from shared.cli.restarts import RestartPolicy
from shared.cli.words import counted
from shared.errors import ExitCode, KvpairError

READY_POLL_S = 0.1
"""Between two questions whether the pair serves."""

KILL_GRACE_S = 5.0
"""From the end of a daemon's own time to drain, or from a second signal, to SIGKILL."""

COMMAND_GRACE_S = 5.0
"""For a command that is told to end because the pair cannot go on."""


class PairFailedError(KvpairError):
    """The pair cannot be kept running."""

    def __init__(self, message: str, *, exit_code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = exit_code


SILENCE_S = 1.0
"""How long stopping may take before the user is told what it waits for."""


@dataclass(slots=True, kw_only=True)
class Daemon:
    """One of the two daemons, running or waiting to be started again."""

    name: str
    argv: Sequence[str]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    start_at_s: float = 0.0
    """When to start it, where it does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run beside the pair."""

    argv: Sequence[str]
    environ: Mapping[str, str]


class Supervisor:
    """Keeps the daemons running until there is a reason to stop.

    Args:
        daemons: The daemons, in the order in which they are started.
        environ: The daemons' environment.
        signals: Where signals come from and children are made.
        is_ready: Whether the pair serves; asked while a command waits for it, with each daemon's
            pid, so that another pair on the same sockets is not taken for this one.
        num_requests: How many requests a daemon still has, by its name; None where it does not
            tell.  Asked when its end takes long.
        say: Tells the user something, one line.
        start_timeout_s: How long a command waits for the pair.
        drain_timeout_s: The daemons' own time to finish what they began.
    """

    def __init__(
        self,
        *,
        daemons: Sequence[Daemon],
        environ: Mapping[str, str],
        signals: SignalWaiter,
        is_ready: Callable[[Mapping[str, int]], bool],
        num_requests: Callable[[str], int | None],
        say: Callable[[str], None],
        start_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        self._daemons = daemons
        self._environ = environ
        self._signals = signals
        self._is_ready, self._num_requests = is_ready, num_requests
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._command: subprocess.Popen[bytes] | None = None
        self._has_served = False

    def run(self, command: Command | None) -> int:
        """Run the pair, and the command; return the exit code after everything has ended.

        Raises:
            PairFailedError: A daemon cannot be kept running, or the pair did not come up in time.
        """
        try:
            return self._run(command)
        finally:
            self._stop()

    def _run(self, command: Command | None) -> int:
        ready_by_s = time.monotonic() + self._start_timeout_s
        while True:
            self._start_what_is_due()
            if not self._has_served and self._serves():
                self._has_served = True
                if command is None:
                    self._say("the pair serves; Ctrl-C stops it")
                else:
                    self._command = self._start_command(command)
            is_waiting = command is not None and self._command is None
            if is_waiting and time.monotonic() >= ready_by_s:
                raise PairFailedError(
                    f"the pair did not serve within {self._start_timeout_s:g} s",
                    hint="its log is above; --start-timeout waits longer",
                    exit_code=ExitCode.FAILED,
                )
            arrived = self._signals.wait(self._wait_s())
            if arrived is not None and arrived.number is not signal.SIGCHLD:
                exit_code = self._on_signal(arrived, is_waiting=is_waiting)
                if exit_code is not None:
                    return exit_code
            for daemon in self._daemons:
                self._reap(daemon)
            if self._command is not None and (status := self._command.poll()) is not None:
                return status if status >= 0 else 128 - status

    def _serves(self) -> bool:
        pids = {daemon.name: daemon.process.pid for daemon in self._daemons if daemon.process}
        return len(pids) == len(self._daemons) and self._is_ready(pids)

    def _wait_s(self) -> float | None:
        """Return how long nothing but a signal can have anything to say."""
        if not self._has_served:
            return READY_POLL_S
        now_s = time.monotonic()
        return min(
            (max(0.0, daemon.start_at_s - now_s) for daemon in self._daemons if not daemon.process),
            default=None,
        )

    def _start_what_is_due(self) -> None:
        for daemon in self._daemons:
            now_s = time.monotonic()
            if daemon.process is None and now_s >= daemon.start_at_s:
                daemon.started_s = now_s
                daemon.process = self._signals.spawn(
                    daemon.argv, environ=self._environ, is_daemon=True
                )

    def _start_command(self, command: Command) -> subprocess.Popen[bytes]:
        try:
            return self._signals.spawn(command.argv, environ=command.environ, is_daemon=False)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            raise PairFailedError(
                f"cannot run {command.argv[0]}: {error.strerror}",
                exit_code=127 if is_missing else 126,  # as shells tell the two apart
            ) from error

    def _on_signal(self, arrived: Signal, *, is_waiting: bool) -> int | None:
        """Pass a signal on to the command, or return the exit code with which to stop.

        Never 0 while a command waits to be run: nobody may take it for done.
        """
        if self._command is not None:
            if not arrived.is_from_terminal:
                self._command.send_signal(arrived.number)
            return None
        if is_waiting:
            return 128 + arrived.number  # as if the signal had found the command
        return ExitCode.INTERRUPTED if arrived.number is signal.SIGINT else ExitCode.OK

    def _reap(self, daemon: Daemon) -> None:
        """Notice a death, and plan the next start."""
        if daemon.process is None or (status := daemon.process.poll()) is None:
            return
        daemon.process = None
        if status == ExitCode.CONFIG:
            raise PairFailedError(
                f"{daemon.name} refuses to run; its last line above says why",
                exit_code=ExitCode.CONFIG,
            )
        now_s = time.monotonic()
        delay_s = daemon.policy.died(now_s=now_s, started_s=daemon.started_s)
        how = _how_it_ended(status)
        if delay_s is None:
            raise PairFailedError(
                f"{daemon.name} {how} and died too often to be started again",
                exit_code=ExitCode.FAILED,
            )
        daemon.start_at_s = now_s + delay_s
        self._say(f"{daemon.name} {how}; starting it again in {delay_s:g} s")

    def _stop(self) -> None:
        """End everything that still runs, and wait for it."""
        if self._command is not None and self._command.poll() is None:
            self._end(self._command, within_s=COMMAND_GRACE_S, what=lambda: "the command is ending")
        # Last started, first ended: what prefilld has begun it hands over to a decoded that lives.
        for daemon in reversed(self._daemons):
            if daemon.process is not None:
                self._end(
                    daemon.process,
                    within_s=self._drain_timeout_s + KILL_GRACE_S,
                    what=partial(self._what_is_left, daemon.name),
                )

    def _what_is_left(self, name: str) -> str:
        num_requests = self._num_requests(name)
        if not num_requests:  # or it does not tell
            return f"{name} is ending"
        return f"{name} may finish {counted(num_requests, 'running request')}"

    def _end(
        self, process: subprocess.Popen[bytes], *, within_s: float, what: Callable[[], str]
    ) -> None:
        """Send SIGTERM, and SIGKILL at the deadline; `what` says what is waited for meanwhile."""
        deadline_s, has_told = time.monotonic() + within_s, False
        _send(process, signal.SIGTERM)
        while process.poll() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                _send(process, signal.SIGKILL)
                process.wait()
                return
            if left_s < within_s - SILENCE_S and not has_told:
                has_told = True
                self._say(f"{what()}, for at most {left_s:.0f} s; Ctrl-C ends it at once")
            arrived = self._signals.wait(min(left_s, SILENCE_S))
            if arrived is not None and arrived.number is not signal.SIGCHLD:
                _send(process, signal.SIGTERM)  # to a daemon, the second means: at once
                deadline_s = min(deadline_s, time.monotonic() + KILL_GRACE_S)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
