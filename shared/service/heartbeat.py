"""The proof that a daemon still works, for its service manager's watchdog and its own log.

One beat a second runs on the event loop, so a loop that hangs beats no more.  The engine thread
has to show that it moves as well: calls end, or, where there is nothing to do, a call that does
nothing ends.  A daemon whose GPU call never returns answers STATUS for ever and computes nothing;
only this notices.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from shared.clock import Clock
    from shared.service.notify import Notifier

LOAD_LOG_NS = 3 * NS_PER_S
"""Between two lines in the log on how far the model is loaded."""

BEAT_S = 1.0
"""How often STATUS is renewed; more often where the watchdog is shorter than four of these."""

BEATS_PER_WATCHDOG = 4
"""Two are asked for; four forgive a beat that a long step or a busy loop delayed."""

STUCK_S = 30.0
"""Without a watchdog, a step that takes longer is reported as stuck.  With one, half its period
is the bound, so that the reason is in the log before the process is killed."""

START_EXTENSION_S = 120.0
"""What every sign of progress buys while loading: more than the longest pause between two of
them, which is that of compiling or capturing kernels."""


class Engine(Protocol):
    """What is watched: `shared.engine.thread.EngineThread`."""

    @property
    def num_finished(self) -> int:
        """Calls that ended so far."""

    def probe(self) -> None:
        """Have `num_finished` move soon if the thread is idle and well."""

    def stack(self) -> str:
        """Return where the thread is now, as a traceback."""


class Heartbeat:
    """Looks after one daemon.  Belongs to the event loop's thread, but for `loaded`.

    Args:
        notifier: The service manager.
        watchdog_s: The watchdog's period; None where there is none.
        describe: Returns what the daemon is doing, in words.
        is_start_extended: Whether the daemon is still starting and should get more time, asked
            after every progress.
    """

    def __init__(
        self,
        *,
        notifier: Notifier,
        watchdog_s: float | None,
        clock: Clock,
        log: FilteringBoundLogger,
        describe: Callable[[], str],
        is_start_extended: Callable[[], bool],
    ) -> None:
        self._notifier, self._clock, self._log = notifier, clock, log
        self._describe, self._is_start_extended = describe, is_start_extended
        self._stuck_s = STUCK_S if watchdog_s is None else watchdog_s / 2
        self._interval_s = min(BEAT_S, (watchdog_s or STUCK_S) / BEATS_PER_WATCHDOG)
        self._has_watchdog = watchdog_s is not None
        self._engine: Engine | None = None
        self._num_finished = 0
        self._num_loaded_bytes, self._num_seen_bytes = 0, 0
        self._percent = 0
        self._percent_logged = 0
        self._next_log_ns = clock.monotonic_ns() + LOAD_LOG_NS
        self._moved_ns = clock.monotonic_ns()
        self._is_stuck = False
        self._told = ""

    @property
    def percent_loaded(self) -> int:
        """How much of the model is loaded, in per cent."""
        return self._percent

    @property
    def silent_s(self) -> float:
        """For how long nothing has been seen to move: less than two beats where all is well."""
        return (self._clock.monotonic_ns() - self._moved_ns) / NS_PER_S

    def watch(self, engine: Engine) -> None:
        """Ask for this engine's progress as well, from now on."""
        self._engine = engine
        self._moved_ns = self._clock.monotonic_ns()

    def loaded(self, num_bytes: int, num_total_bytes: int) -> None:
        """Take note of how far loading is; from any thread."""
        self._num_loaded_bytes = num_bytes
        self._percent = 100 * num_bytes // max(1, num_total_bytes)

    async def run(self) -> None:
        """Beat, for ever."""
        while True:
            self.beat()
            await asyncio.sleep(self._interval_s)

    def beat(self) -> None:
        """Look once: feed the watchdog if everything moved, and renew STATUS."""
        self.tell()
        self._log_loading()
        if not self._has_moved():
            self._judge_silence()
            return
        self._moved_ns, self._is_stuck = self._clock.monotonic_ns(), False
        if self._has_watchdog:
            self._notifier.alive()
        if self._is_start_extended():
            self._notifier.extend_timeout(START_EXTENSION_S)

    def tell(self) -> None:
        """Renew STATUS where it changed."""
        text = self._describe()
        if text != self._told:
            self._told = text
            self._notifier.status(text)

    def _log_loading(self) -> None:
        """Tell the log how far a long load is; a short one is not worth a line."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_log_ns or self._percent in (self._percent_logged, 100):
            return
        self._percent_logged, self._next_log_ns = self._percent, now_ns + LOAD_LOG_NS
        self._log.info("model.loading", percent=self._percent)

    def _has_moved(self) -> bool:
        if self._engine is None:  # not made yet: the loop is all there is
            return True
        num_bytes, num_finished = self._num_loaded_bytes, self._engine.num_finished
        has_moved = num_finished != self._num_finished or num_bytes != self._num_seen_bytes
        self._num_finished, self._num_seen_bytes = num_finished, num_bytes
        self._engine.probe()
        return has_moved

    def _judge_silence(self) -> None:
        silent_s = self.silent_s
        if silent_s < self._stuck_s or self._is_stuck or self._engine is None:
            return
        self._is_stuck = True
        self._log.error("engine.stuck", silent_s=round(silent_s, 3), stack=self._engine.stack())
