"""A daemon as a process: its log, its loop, its service manager, its exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import uvloop

from shared import logs
from shared.clock import SystemClock
from shared.service.frame import LOG_FLUSH_S, DaemonName, Service
from shared.service.notify import Notifier, watchdog_period_s
from shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.config import ResolvedConfig
    from shared.errors import KvpairError

SWITCH_INTERVAL_S = 0.00005
"""How long the engine thread may hold the GIL while the loop wants it, and the other way round.

Python's own 5 ms would be added to every message that arrives in the middle of a step.  A hand-over
between GPUs has several such moments (its pull is launched while its HANDOFF arrives), and half a
millisecond for each would be more than all the rest of it takes.
"""


def serve(
    name: DaemonName,
    app: Callable[[Service], Awaitable[None]],
    *,
    resolve: Callable[[], ResolvedConfig],
    resolved: ResolvedConfig,
) -> NoReturn:
    """Run a daemon in this process until it ends, and the process with it.

    Args:
        name: The daemon.
        app: What it does.
        resolve: Reads the configuration once more, from the same sources.
        resolved: What that returned at the start.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log = resolved.config.log
    writer = logs.configure(level=log.level, log_format=log.format, daemon=name)
    service = Service(
        name=name,
        resolved=resolved,
        reread=resolve,
        writer=writer,
        notifier=Notifier.from_environ(os.environ),
        watchdog_s=watchdog_period_s(os.environ),
        clock=SystemClock(),
    )
    service.log.info("daemon.started", version=__version__, pid=os.getpid())
    for warning in resolved.warnings:
        service.log.warning("config.questionable", message=warning)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code = runner.run(service.run(app))
        service.finish(exit_code)  # in here, so that closing the runner cannot outlast it


def log_refusal(name: DaemonName, error: KvpairError) -> None:
    """Tell a service manager, in its journal's form, why a daemon will not even begin."""
    writer = logs.configure(level="error", log_format="json", daemon=name)
    logs.get_logger().error("daemon.refused", error=str(error), exit_code=error.exit_code.value)
    Notifier.from_environ(os.environ).status(f"refused: {error}")
    writer.shutdown(LOG_FLUSH_S)
