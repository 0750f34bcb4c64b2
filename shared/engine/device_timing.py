"""How long work on a stream takes the device, by its own clock.

A timing lies around work: an event in front of it, one behind it, and one within where that is
asked for.  The device stamps each when it gets there.  So nobody waits for a reading: the event
behind the work is the one that the host polls anyway, and when that is passed, so are the others.

Where the stream has nothing else to do, the device stamps the first event at once, so a reading
also holds what the host needs until the work is there.  Behind other work it is the work's alone.

Recording an event takes the host some microseconds, of a hand-over that may take 500.  A timing
records one more than a mark does, in front, so on the way from a prompt's last block to the second
token there are two more: before the pull, and before the first step.  prefilld's are recorded while
its GPU has work ahead.  Events are used again: making one costs the host as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shared.clock import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedEvent(Protocol):
    """An event that the device stamps with its clock: what is used here of `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - whatever its maker takes for a stream
        """Be stamped behind all that is enqueued on a stream now."""

    def query(self) -> bool:
        """Whether it was stamped since it was recorded."""

    def synchronize(self) -> None:
        """Return when it was."""

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - an event of the same maker
        """Return milliseconds from this stamp to another; both are there."""


class Timing(Protocol):
    """Work on a stream, from where it was begun to where it was ended; a mark from then on."""

    def split(self) -> None:
        """Note the place behind what was enqueued until now; once, before `end`."""

    def end(self) -> None:
        """Note that everything to be timed was enqueued; once."""

    def is_passed(self) -> bool:
        """Whether the work is done."""

    def wait(self) -> None:
        """Return when it is; the interpreter is free meanwhile."""

    def device_ns(self) -> int | None:
        """Return how long the work took the device, once it is done; None where none did it."""

    def split_ns(self) -> int | None:
        """Return how long it took until `split`; None also where that was not noted."""


class Untimed:
    """A timing of work that the host itself does, and has done by the time it ends."""

    def split(self) -> None:
        """See `Timing.split`."""

    def end(self) -> None:
        """See `Timing.end`."""

    def is_passed(self) -> bool:
        """See `Timing.is_passed`."""
        return True

    def wait(self) -> None:
        """See `Timing.wait`."""

    def device_ns(self) -> int | None:
        """Return None: what the host took is no device's time."""
        return None

    def split_ns(self) -> int | None:
        """Return None."""
        return None


class DeviceTimer:
    """Times work on one stream.  All calls come from one thread.

    Args:
        make_event: Returns a new event.
        stream: What it is recorded on.
    """

    def __init__(self, make_event: Callable[[], TimedEvent], stream: object) -> None:
        self._make_event, self._stream = make_event, stream
        self._free: list[TimedEvent] = []
        """As many as were ever out at once: some for each piece of work in flight."""

    def begin(self) -> Timing:
        """Begin to time what is enqueued from here on."""
        return _DeviceTiming(self)

    def record(self) -> TimedEvent:
        """Record an event that nobody reads any more, or a new one."""
        event = self._free.pop() if self._free else self._make_event()
        event.record(self._stream)
        return event

    def take_back(self, events: list[TimedEvent]) -> None:
        """Let other timings have the events of one that was read."""
        self._free += events


class _DeviceTiming:
    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._events = [timer.record()]
        self._readings_ns: list[int] = []
        """From the first event to each of the others; empty until they are read."""
        self._has_split = False

    def split(self) -> None:
        self._events.append(self._timer.record())
        self._has_split = True

    def end(self) -> None:
        self._events.append(self._timer.record())

    def is_passed(self) -> bool:
        return bool(self._readings_ns) or self._events[-1].query()

    def wait(self) -> None:
        if not self._readings_ns:
            self._events[-1].synchronize()

    def device_ns(self) -> int | None:
        return self._read()[-1]

    def split_ns(self) -> int | None:
        return self._read()[0] if self._has_split else None

    def _read(self) -> list[int]:
        if not self._readings_ns:
            first, *others = self._events
            self._readings_ns = [round(first.elapsed_time(event) * NS_PER_MS) for event in others]
            self._timer.take_back(self._events)
            self._events = []
        return self._readings_ns


def add_device_ns(total_ns: int | None, more_ns: int | None) -> int | None:
    """Return the sum of two device times, of which either may be none."""
    if total_ns is None or more_ns is None:
        return more_ns if total_ns is None else total_ns
    return total_ns + more_ns
