"""A daemon whose log and metric calls are timed, thread by thread; only for measuring.

    python -m tests.benchmarks.watched_daemon FILE prefilld|decoded [FLAGS…]

runs the daemon as its own program would, and writes what was measured to FILE at its end.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import structlog

from shared.clock import NS_PER_MS
from shared.metrics import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable


LOG_METHODS = ("debug", "info", "warning", "error", "critical")
METRIC_METHODS = (
    (prometheus_client.Counter, "inc"),
    (prometheus_client.Counter, "labels"),
    (prometheus_client.Histogram, "observe"),
    (prometheus_client.Histogram, "labels"),
    (Distribution, "observe"),
)
STEPS = {
    "prefilld": (("shared.engine.prefilling", "EagerPrefiller", "launch"),),
    "decoded": (("decoded.turns", "EagerTurns", "take"),),
}
"""What the engine thread does that is a step."""


class Stopwatch:
    """Thread time, and the longest wall time, of calls by kind and thread."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        """By (kind, thread): how many, thread time in ns, longest wall time in ns."""

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed; calls within calls of a kind count once."""
        inside = threading.local()

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if getattr(inside, "is_running", False):
                return function(*args, **kwargs)
            inside.is_running = True
            wall_ns, thread_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                entry = self.calls[kind, threading.current_thread().name.split("_")[0]]
                entry[0] += 1
                entry[1] += time.thread_time_ns() - thread_ns
                entry[2] = max(entry[2], time.perf_counter_ns() - wall_ns)
                inside.is_running = False

        return call

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        rows = [
            {
                "kind": kind, "thread": thread, "calls": calls,
                "thread_ms": thread_ns / NS_PER_MS, "longest_ms": longest_ns / NS_PER_MS,
            }
            for (kind, thread), (calls, thread_ns, longest_ns) in sorted(self.calls.items())
        ]  # fmt: skip
        path.write_text(json.dumps(rows))


class TimedLog:
    """A logger whose calls are timed."""

    def __init__(self, log: object, watch: Stopwatch) -> None:
        self._log = log
        for name in LOG_METHODS:
            setattr(self, name, watch.timed("log", getattr(log, name)))

    def __getattr__(self, name: str) -> object:
        """Everything else is the logger's."""
        return getattr(self._log, name)


def main() -> None:
    """Instrument, then run the daemon."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [name, *sys.argv[3:]]
    watch = Stopwatch()
    for kind, method in METRIC_METHODS:
        setattr(kind, method, watch.timed("metric", getattr(kind, method)))
    get_logger = structlog.get_logger
    structlog.get_logger = lambda *args, **values: TimedLog(get_logger(*args, **values), watch)
    for module, owner, method in STEPS[name]:
        kind = getattr(importlib.import_module(module), owner)
        setattr(kind, method, watch.timed("step", getattr(kind, method)))
    atexit.register(watch.write, path)
    importlib.import_module(f"{name}.__main__").main()


if __name__ == "__main__":
    main()
