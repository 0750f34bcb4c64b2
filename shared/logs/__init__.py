"""Logs of a daemon: structlog, one line an event, written from a queue.

Rules for whoever logs: an event is a constant `noun.verb` (`handoff.sent`), its values are
keys; ids are bound once; one line for each edge of a life cycle, none for each token.

    log = shared.logs.get_logger()
    log.info("lease.released", lease_id=7, num_blocks=12)

JSON lines where a program reads (the journal, a file, a pipe), colours on a terminal.  The
standard library's `logging`, warnings and uncaught exceptions come out of the same queue.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Protocol, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from shared.logs.processors import (
    cap_values,
    console_renderer,
    never_raising,
    render_json,
    stamp,
)
from shared.logs.writer import LogWriter

__all__ = ["LogWriter", "configure", "get_logger", "set_level"]

LOG_DROPPED = "log.dropped"
LIBRARY_LOGGED = "library.logged"
EXCEPTION_UNCAUGHT = "exception.uncaught"


class Stream(Protocol):
    """Where the lines go: anything with a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


def get_logger() -> FilteringBoundLogger:
    """Return a logger; it follows whatever `configure` says, also later."""
    return cast("FilteringBoundLogger", structlog.get_logger())


def configure(
    *, level: str, log_format: str, daemon: str, stream: Stream | None = None
) -> LogWriter:
    """Send all of this process's logs through one queue to `stream`.

    Args:
        level: The lowest level that is logged: debug, info, warning or error.
        log_format: json, console, or auto: console on a terminal, else json.
        daemon: The name that every line carries.
        stream: Where to; None is stderr.

    Returns:
        The writer.  Its `shutdown` puts back what was replaced here.
    """
    stream = sys.stderr if stream is None else stream
    fd = stream.fileno()
    # Neither JOURNAL_STREAM nor INVOCATION_ID is asked: a desktop's terminals inherit both, and
    # under a service manager stderr is no terminal anyway.
    is_console = log_format == "console" or (log_format == "auto" and os.isatty(fd))
    render: Processor = (
        console_renderer(colors=os.isatty(fd) and "NO_COLOR" not in os.environ)
        if is_console
        else render_json
    )
    stamping = stamp(daemon)

    def render_dropped(num_lines: int) -> bytes:
        event: EventDict = {"event": LOG_DROPPED, "level": "warning", "num_lines": num_lines}
        stamping(None, "warning", event)
        return cast("bytes", render(None, "warning", event))

    writer = LogWriter(fd, render_dropped=render_dropped)
    threshold = _threshold(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamping,
            never_raising([structlog.processors.format_exc_info, cap_values, render], render),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        context_class=dict,
        logger_factory=lambda *_: _QueueLogger(writer),
        cache_logger_on_first_use=False,
    )
    writer.call_on_shutdown(structlog.reset_defaults)
    _capture_stdlib(writer, threshold)
    _capture_uncaught(writer)
    return writer


def set_level(level: str) -> None:
    """Log from this level on, after `configure`; loggers that were bound before keep theirs.

    Args:
        level: debug, info, warning or error.
    """
    threshold = _threshold(level)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(threshold))
    logging.getLogger().setLevel(threshold)


def _threshold(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


class _QueueLogger:
    """What structlog calls with a rendered line."""

    def __init__(self, writer: LogWriter) -> None:
        self.msg = writer.put

    def __getattr__(self, method: str) -> object:
        """Every level ends in the same queue."""
        return self.msg


class _ThroughStructlog(logging.Handler):
    """Carries the standard library's records into our events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record as an event of ours."""
        try:
            structlog.get_logger().log(
                record.levelno,
                LIBRARY_LOGGED,
                logger=record.name,
                message=record.getMessage(),
                exc_info=record.exc_info,
            )
        except Exception:  # a border: a foreign record must not break its caller
            self.handleError(record)


def _capture_stdlib(writer: LogWriter, threshold: int) -> None:
    root = logging.getLogger()
    handler = _ThroughStructlog()
    before = root.level
    root.addHandler(handler)
    root.setLevel(threshold)
    logging.captureWarnings(capture=True)

    def undo() -> None:
        root.removeHandler(handler)
        root.setLevel(before)
        logging.captureWarnings(capture=False)

    writer.call_on_shutdown(undo)


def _capture_uncaught(writer: LogWriter) -> None:
    def log_uncaught(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        structlog.get_logger().critical(
            EXCEPTION_UNCAUGHT,
            thread=threading.current_thread().name,
            exc_info=(kind, error or kind(), trace),
        )

    before = (sys.excepthook, threading.excepthook, sys.unraisablehook)
    sys.excepthook = log_uncaught
    threading.excepthook = lambda hook: log_uncaught(
        hook.exc_type, hook.exc_value, hook.exc_traceback
    )
    sys.unraisablehook = lambda hook: log_uncaught(
        hook.exc_type, hook.exc_value, hook.exc_traceback
    )

    def undo() -> None:
        sys.excepthook, threading.excepthook, sys.unraisablehook = before

    writer.call_on_shutdown(undo)
