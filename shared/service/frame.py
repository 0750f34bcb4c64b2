"""The frame that a daemon's own code runs in: loop, signals, states, failures, the way out.

signal      first SIGTERM or SIGINT            `draining` is set; the app finishes what it began
            while still loading                the app is cancelled at once
            second                             exit at once
            SIGHUP                             limits and log level are read again
deadline    `drain_timeout_s` after `drain`    the app is cancelled
failure     `fatal`, from any thread           logged; the app is cancelled; exit 1 within 5 s
                                               even when some thread or the loop itself hangs
refusal     the app raises a KvpairError       one line without a traceback; its exit code
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

from protocol.errors import UnixSocketError
from shared import logs
from shared.clock import NS_PER_S, Clock
from shared.config import Config, ResolvedConfig
from shared.errors import ExitCode, KvpairError
from shared.logs import LogWriter
from shared.metrics import Metrics
from shared.service.heartbeat import Engine
from shared.service.notify import Notifier
from shared.service.reload import reload_config
from shared.service.standing import Standing
from shared.states import DaemonName, DaemonState
from shared.tracing import NoTracer, Tracer
from shared.version import __version__

__all__ = ["DaemonName", "DaemonState", "Service"]

FAILURE_DEADLINE_S = 4.0
"""From `fatal` to the end of the process, whatever hangs; five seconds are promised."""

CANCEL_GRACE_S = 2.0
"""For the app's `finally` clauses: closing links, removing its socket."""

EXIT_GRACE_S = 2.0
"""For the interpreter's own end, which waits for threads that may never return."""

LOG_FLUSH_S = 1.0
"""For the last lines, which a stuck reader may refuse."""


class Service:
    """What a daemon's app is given: its configuration, its logs and metrics, its way out.

    Everything but `fatal` belongs to the event loop's thread.
    """

    def __init__(
        self,
        *,
        name: DaemonName,
        resolved: ResolvedConfig,
        reread: Callable[[], ResolvedConfig],
        writer: LogWriter,
        notifier: Notifier,
        watchdog_s: float | None = None,
        clock: Clock,
    ) -> None:
        self.name = name
        self.resolved = resolved
        """Replaced as a whole when the configuration is read again: hold nothing of `limits`."""
        self.clock = clock
        self.metrics = Metrics(name)
        self.log = logs.get_logger()
        self.tracer: Tracer = NoTracer()
        """Where requests that have ended are told; the app opens the configured one."""
        self.draining = asyncio.Event()
        """Set once the daemon was told to stop."""
        self._reread = reread
        self._writer = writer
        self._standing = Standing(
            name=name,
            model=resolved.config.model.path,
            notifier=notifier,
            watchdog_s=watchdog_s,
            clock=clock,
            log=self.log,
        )
        self._started_ns = clock.monotonic_ns()
        self._drain_ends_ns: int | None = None
        self._was_loading = False
        self._failed = asyncio.Event()
        self._failure_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics.counter_from(
            "kvpair_log_dropped_lines_total",
            "Log lines that could not be written.",
            lambda: writer.num_dropped,
        )
        self.metrics.gauges_from(
            "kvpair_state",
            "1 for the state that the daemon is in, 0 for all others.",
            "state",
            lambda: {state.value: float(state is self.state) for state in DaemonState},
        )
        self.metrics.gauge("kvpair_build_info", "Always 1.", ["version"]).labels(__version__).set(1)

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.resolved.config

    @property
    def socket_path(self) -> Path:
        """Where this daemon listens."""
        return Path(getattr(self.config, self.name).socket)

    @property
    def state(self) -> DaemonState:
        """The present state."""
        return self._standing.state

    def attend(
        self,
        engine: Engine,
        *,
        num_requests: Callable[[], int],
        is_peer_starting: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have the daemon looked after: its engine watched, its work told to the manager.

        Args:
            engine: What has to move for the watchdog to be fed.
            num_requests: Returns how many requests are the daemon's now.
            is_peer_starting: Returns whether the peer is there and not ready yet, for which a
                daemon that cannot be ready without it is given time.
        """
        self._standing.attend(engine, num_requests=num_requests, is_peer_starting=is_peer_starting)

    def loaded(self, num_bytes: int, num_total_bytes: int) -> None:
        """Take note of how much of the model is loaded; from any thread."""
        self._standing.heartbeat.loaded(num_bytes, num_total_bytes)

    def set_state(self, state: DaemonState) -> None:
        """Enter a state: log it, tell the service manager.  DRAINING is never left again."""
        if self.state not in (state, DaemonState.DRAINING):
            self._standing.enter(state, stop_within_s=self.drain_remaining_s())

    def status(self) -> dict[str, object]:
        """Return what both daemons' STATUS have in common."""
        return {
            "state": self.state.value,
            "version": __version__,
            "uptime_s": round((self.clock.monotonic_ns() - self._started_ns) / NS_PER_S, 3),
            "pid": os.getpid(),
            "silent_s": round(self._standing.heartbeat.silent_s, 3),
            "counters": self.metrics.snapshot(),
        }

    def drain_remaining_s(self) -> float:
        """Return how long the app may still take to finish; the whole time-out before `drain`."""
        if self._drain_ends_ns is None:
            return self.config.limits.drain_timeout_s
        return max(0.0, (self._drain_ends_ns - self.clock.monotonic_ns()) / NS_PER_S)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task whose failure is the daemon's, and which ends with the daemon."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def drain(self, *, reason: str) -> None:
        """Begin to shut down.  A second call changes nothing."""
        if self.draining.is_set():
            return
        self._drain_ends_ns = self.clock.monotonic_ns() + round(
            self.config.limits.drain_timeout_s * NS_PER_S
        )
        self.log.info("drain.started", reason=reason, was=self.state.value)
        self._was_loading = self.state is DaemonState.LOADING
        self.set_state(DaemonState.DRAINING)
        self.draining.set()

    def fatal(self, error: BaseException) -> None:
        """Give up: whatever is in flight fails, and the process ends with 1.  From any thread."""
        with self._failure_lock:
            is_first = self._failure is None
            self._failure = self._failure or error
        if not is_first:
            self.log.error("failure.followed", exc_info=error)
            return
        self.log.critical("daemon.failed", error=str(error), exc_info=error)
        reaper = threading.Timer(FAILURE_DEADLINE_S, self._exit_now, (ExitCode.FAILED,))
        reaper.daemon = True
        reaper.start()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._failed.set)

    async def run(self, app: Callable[[Service], Awaitable[None]]) -> int:
        """Run the app to its end, however it ends, and return the exit code."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_exception)
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._on_stop_signal, signum)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        self.spawn(self._standing.heartbeat.run(), name="heartbeat")
        main = asyncio.ensure_future(app(self))
        watchers = [
            asyncio.ensure_future(self._failed.wait()),
            asyncio.ensure_future(self._drained_too_long()),
        ]
        await asyncio.wait({main, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        for task in (main, *watchers, *self._tasks):
            task.cancel()
        await asyncio.wait({main, *watchers, *self._tasks}, timeout=CANCEL_GRACE_S)
        return self._judge(main)

    def _judge(self, main: asyncio.Future[None]) -> int:
        """Turn how the app ended into an exit code, and log what nobody has logged yet."""
        if not main.done():
            self.log.error("app.hung", grace_s=CANCEL_GRACE_S)
        elif not main.cancelled() and (error := main.exception()) is not None:
            refusal = _refusal(error)
            if refusal is not None and self._failure is None:
                self.log.error("daemon.refused", error=str(error), exit_code=refusal.value)
                self._standing.refused(str(error))
                return refusal
            self.fatal(error)
        elif self._failure is None and not self.draining.is_set():
            self.fatal(RuntimeError(f"{self.name} ended without being told to"))
        return ExitCode.OK if self._failure is None else ExitCode.FAILED

    def finish(self, exit_code: int) -> NoReturn:
        """Write the last lines and end the process, without waiting for threads that hang."""
        self.log.info("daemon.stopped", exit_code=int(exit_code))
        if exit_code == ExitCode.FAILED:
            self._exit_now(exit_code)
        self._writer.shutdown(LOG_FLUSH_S)
        reaper = threading.Timer(EXIT_GRACE_S, os._exit, (exit_code,))
        reaper.daemon = True
        reaper.start()
        sys.exit(exit_code)

    def _exit_now(self, exit_code: int) -> NoReturn:
        self._writer.shutdown(LOG_FLUSH_S)
        os._exit(exit_code)

    async def _drained_too_long(self) -> None:
        """Return once the app has had its time to finish; at once where it had not begun."""
        await self.draining.wait()
        if self._was_loading:
            return
        await asyncio.sleep(self.drain_remaining_s())
        self.log.warning("drain.expired", timeout_s=self.config.limits.drain_timeout_s)

    def _reload(self) -> None:
        """Read the configuration again and take what can be taken while serving."""
        with self._standing.reloading():
            try:
                reload = reload_config(self.resolved, self._reread())
            except KvpairError as error:
                self.log.error("reload.refused", error=str(error))  # noqa: TRY400  the user's fault
                return
            self.resolved = reload.resolved
            logs.set_level(self.config.log.level)
            self.log.info("reload.done", changed=dict(reload.changed))
            if reload.needs_restart:
                self.log.warning("reload.needs-restart", keys=list(reload.needs_restart))

    def _on_stop_signal(self, signum: signal.Signals) -> None:
        if self.draining.is_set():
            self.log.warning("drain.interrupted", signal=signum.name)
            self._exit_now(128 + signum)
        self.drain(reason=signum.name)

    def _on_loop_exception(
        self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]
    ) -> None:
        """Take an exception that reached the loop from a callback or an abandoned task."""
        self.fatal(context.get("exception") or RuntimeError(context["message"]))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fatal(error)


def _refusal(error: BaseException) -> ExitCode | None:
    """Return the exit code of an error that the user can mend; None for a fault of ours."""
    if isinstance(error, KvpairError):
        return error.exit_code
    if isinstance(error, UnixSocketError):  # another instance, or no right to make the socket
        return ExitCode.CONFIG
    return None
