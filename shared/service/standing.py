"""Where a daemon stands: its state, and what its log and the service manager are told of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from shared.service.heartbeat import Heartbeat
from shared.states import READY_STATES, DaemonName, DaemonState, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import FilteringBoundLogger

    from shared.clock import Clock
    from shared.service.heartbeat import Engine
    from shared.service.notify import Notifier

STOP_GRACE_S = 15.0
"""What a service manager is asked for beyond the time to drain: everything else that has a
deadline on the way out, several times over.  The units' TimeoutStopSec has the same."""


class Standing:
    """The state of one daemon.  Belongs to the event loop's thread, but for `loaded`.

    Args:
        name: The daemon.
        model: The configured model.
        notifier: The service manager.
        watchdog_s: The watchdog's period; None where there is none.
    """

    def __init__(
        self,
        *,
        name: DaemonName,
        model: str,
        notifier: Notifier,
        watchdog_s: float | None,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._name, self._model = name, model
        self._notifier, self._clock, self._log = notifier, clock, log
        self.state = DaemonState.LOADING
        """The present state; `enter` changes it."""
        self.heartbeat = Heartbeat(
            notifier=notifier,
            watchdog_s=watchdog_s,
            clock=clock,
            log=log,
            describe=self.describe,
            is_start_extended=self._is_start_extended,
        )
        self._is_ready = False
        self._num_requests: Callable[[], int] = lambda: 0
        self._is_peer_starting: Callable[[], bool] = lambda: False

    def attend(
        self,
        engine: Engine,
        *,
        num_requests: Callable[[], int],
        is_peer_starting: Callable[[], bool],
    ) -> None:
        """See `Service.attend`."""
        self._num_requests, self._is_peer_starting = num_requests, is_peer_starting
        self.heartbeat.watch(engine)

    def enter(self, state: DaemonState, *, stop_within_s: float) -> None:
        """Enter another state.

        Args:
            state: The new state.
            stop_within_s: How long the daemon may take to stop, from now.
        """
        self.state = state
        self._log.info("state.entered", state=state.value)
        if state is DaemonState.DRAINING:
            self._notifier.stopping(within_s=stop_within_s + STOP_GRACE_S)
        elif not self._is_ready and state in READY_STATES[self._name]:
            self._is_ready = True
            self._notifier.ready()
        self.heartbeat.tell()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Tell the manager of a reload; one that comes during the start is not its business."""
        if not self._is_ready:
            yield
            return
        self._notifier.reloading(now_ns=self._clock.monotonic_ns())
        try:
            yield
        finally:
            self._notifier.ready()

    def refused(self, reason: str) -> None:
        """Leave the reason in STATUS, which outlives the process."""
        self._notifier.status(f"refused: {reason}")

    def describe(self) -> str:
        """Return in one line of words what the daemon is doing."""
        return describe(
            self._name,
            self.state,
            model=self._model,
            percent=self.heartbeat.percent_loaded,
            num_requests=self._num_requests(),
        )

    def _is_start_extended(self) -> bool:
        if self._is_ready:
            return False
        return self.state is DaemonState.LOADING or self._is_peer_starting()
