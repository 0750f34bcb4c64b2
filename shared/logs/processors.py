"""What happens to a log line between the call and the queue: stamped, cut to size, rendered.

Every line is at most `MAX_LINE_BYTES`, and no bytes object leaves the process: handles and
keys are capabilities, so only their length and a hash are told.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec
import structlog
from structlog.typing import EventDict, Processor, ProcessorReturnValue, WrappedLogger

MAX_LINE_BYTES = 8192
"""journald splits lines at 48 KiB, pipes at 4 KiB are atomic; a screen holds about 8 KiB."""

MAX_TEXT_CHARACTERS = 1024
"""Longest text value; nothing but a traceback needs more."""

MAX_TRACEBACK_CHARACTERS = 4096
"""The end of a traceback, which is where the fault is."""

MAX_HASHED_BYTES = 4096
"""Of a bytes value, for its hash: tells handles and keys apart, and takes microseconds."""

MAX_ITEMS = 16
"""Longest list or map that is shown whole: a block table has thousands of ids."""

MAX_DEPTH = 4
"""Deepest nesting that is shown."""

MAX_INTEGER = 1 << 63
"""Larger ones are shown as text: not every reader of JSON has them."""

_HEAD = ("timestamp", "level", "daemon", "event")
"""Keys that survive when a whole line is too long."""


def stamp(daemon: str) -> Processor:
    """Return a processor that adds the daemon's name and both clocks."""
    wall_clock = structlog.processors.TimeStamper(fmt="iso", utc=True)

    def add(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["daemon"] = daemon
        event["monotonic_ns"] = time.monotonic_ns()
        return wall_clock(logger, method, event)

    return add


def never_raising(processors: Sequence[Processor], render: Processor) -> Processor:
    """Return the processors as one that never raises: whoever logs must not fail by it.

    Args:
        processors: They may meet values whose own code raises; the last one renders.
        render: Renders what is told in place of a line that could not be.
    """

    def process(logger: WrappedLogger, method: str, event: EventDict) -> ProcessorReturnValue:
        head = {key: event[key] for key in _HEAD if key in event}
        result: ProcessorReturnValue = event
        try:
            for processor in processors:
                result = processor(logger, method, result)  # type: ignore[arg-type]
        except Exception as error:  # a border: the values are foreign code
            fault = {"unrendered": f"its values failed: {type(error).__name__}"}
            return render(logger, method, {**head, **fault})
        return result

    return process


def cap_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Make every value short and harmless, and then the line as a whole."""
    for key, value in event.items():
        if key == "exception" and isinstance(value, str):
            event[key] = _encodable(value[-MAX_TRACEBACK_CHARACTERS:])
        else:
            event[key] = cap(value)
    return event if len(_encode(event)) < MAX_LINE_BYTES else _shrink(event)


def cap(value: object, depth: int = 0) -> object:
    """Return a value as what may stand in a log line: bounded, made of plain types."""
    match value:
        case None | bool() | float():
            return value
        case int():
            return value if abs(value) < MAX_INTEGER else str(value)
        case str():
            return _cap_text(value)
        case bytes() | bytearray() | memoryview():
            view = memoryview(value).cast("B")
            digest = hashlib.sha256(view[:MAX_HASHED_BYTES]).hexdigest()[:16]
            return f"<{view.nbytes} bytes, sha256 {digest}…>"
        case Mapping() | Sequence() | set() | frozenset() if depth >= MAX_DEPTH:
            return f"<{type(value).__name__} of {len(value)}>"
        case Mapping():
            shown = {
                _cap_text(str(key)): cap(item, depth + 1)
                for key, item in islice(value.items(), MAX_ITEMS)
            }
            if len(value) > MAX_ITEMS:
                shown["…"] = f"and {len(value) - MAX_ITEMS} more"
            return shown
        case Sequence() | set() | frozenset():
            items = [cap(item, depth + 1) for item in islice(value, MAX_ITEMS)]
            if len(value) > MAX_ITEMS:
                items.append(f"… and {len(value) - MAX_ITEMS} more")
            return items
        case _:
            return _cap_text(_describe(value))


def _cap_text(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARACTERS:
        return _encodable(text)
    shown = _encodable(text[:MAX_TEXT_CHARACTERS])
    return f"{shown}… and {len(text) - MAX_TEXT_CHARACTERS} more characters"


def _encodable(text: str) -> str:
    """Escape lone surrogates, which no encoding has; paths with odd bytes contain them."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _describe(value: object) -> str:
    """Return a value's own text; a value that cannot say what it is must not stop a log line."""
    try:
        return str(value)
    except Exception as error:  # __str__ is foreign code
        return f"<{type(value).__name__}, whose text failed: {type(error).__name__}>"


def render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    """Render one line of JSON, its keys in the order in which a reader wants them."""
    return _encode({key: event.pop(key) for key in _HEAD if key in event} | dict(event)) + b"\n"


def _encode(event: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)


def _shrink(event: EventDict) -> EventDict:
    """Replace the longest values by their length until the line fits."""
    lengths = {key: len(_encode({key: value})) for key, value in event.items()}
    excess = sum(lengths.values()) - MAX_LINE_BYTES + 1
    for key in sorted(lengths, key=lambda key: lengths[key], reverse=True):
        if excess <= 0:
            break
        if key not in _HEAD:
            event[key] = f"<left out: {lengths[key]} bytes>"
            excess -= lengths[key] - len(_encode({key: event[key]}))
    return event


def console_renderer(*, colors: bool) -> Processor:
    """Return a processor that renders one line for human eyes."""
    render = structlog.dev.ConsoleRenderer(
        colors=colors,
        exception_formatter=structlog.dev.plain_traceback,
        pad_event_to=24,
    )

    def to_bytes(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
        event.pop("monotonic_ns", None)
        line = render(logger, method, event)
        return line.encode(errors="backslashreplace") + b"\n"

    return to_bytes
