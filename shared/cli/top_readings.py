"""What `kvpair top` knows: readings of both daemons over the last minutes, as rates and quantiles.

Pure: time comes with the readings.  Counters of a daemon that was restarted begin anew, which
shows as a fall; such a stretch counts from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_READINGS = 120
"""Two minutes at one reading a second: as many as the widest sparkline shows."""

WINDOW_S = 10.0
"""Over which numbers are told; sparklines go from reading to reading."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Samples:
    """One daemon's metrics at one moment."""

    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    """By name, then by labels."""

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Read Prometheus' text format."""
        from prometheus_client.parser import (  # noqa: PLC0415  not for `--help`
            text_string_to_metric_families,
        )

        values: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                values.setdefault(sample.name, {})[labels] = float(sample.value)
        return cls(values)

    def total(self, name: str) -> float:
        """Return a metric's sum over all its labels."""
        return sum(self.values.get(name, {}).values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return a metric by one of its labels, summed over the others."""
        found: dict[str, float] = {}
        for labels, value in self.values.get(name, {}).items():
            key = dict(labels).get(label)
            if key is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's counts up to each bound."""
        return {float(bound): count for bound, count in self.by(f"{name}_bucket", "le").items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one daemon said when it was asked."""

    at_s: float
    """Monotonic."""
    status: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    fault: str | None = None
    """Why it did not answer."""


class History:
    """One daemon's last readings."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=MAX_READINGS)

    def add(self, reading: Reading) -> None:
        """Take a reading, the newest."""
        self._readings.append(reading)

    @property
    def last(self) -> Reading:
        """The newest reading; an empty one before the first."""
        return self._readings[-1] if self._readings else Reading(at_s=0.0)

    def rate(self, name: str) -> float | None:
        """Return a counter's growth a second over the window; None where that is not known."""
        before = self._window_start()
        return None if before is None else _rate(before, self.last, name)

    def rates(self, name: str) -> list[float]:
        """Return a counter's growth a second from reading to reading, the newest last."""
        found = [_rate(before, after, name) for before, after in self._steps()]
        return [0.0 if rate is None else rate for rate in found]

    def quantile(self, name: str, share: float) -> float | None:
        """Return a histogram's quantile over the window; None where nothing was counted."""
        before = self._window_start()
        return None if before is None else _quantile(before, self.last, name, share)

    def quantiles(self, name: str, share: float) -> list[float]:
        """Return a quantile from reading to reading, the newest last; 0 where nothing came."""
        found = [_quantile(before, after, name, share) for before, after in self._steps()]
        return [0.0 if value is None else value for value in found]

    def _steps(self) -> Iterable[tuple[Reading, Reading]]:
        readings = list(self._readings)
        return pairwise(readings)

    def _window_start(self) -> Reading | None:
        """Return the oldest reading of the window that the newest can be compared with."""
        last = self.last
        for reading in self._readings:
            if reading.fault is None and last.at_s - reading.at_s <= WINDOW_S:
                return reading if reading is not last else None
        return None


def _rate(before: Reading, after: Reading, name: str) -> float | None:
    duration_s = after.at_s - before.at_s
    if before.fault is not None or after.fault is not None or duration_s <= 0:
        return None
    return _growth(before.samples.total(name), after.samples.total(name)) / duration_s


def _growth(before: float, after: float) -> float:
    return after - before if after >= before else after


def _quantile(before: Reading, after: Reading, name: str, share: float) -> float | None:
    """Return a quantile of what came between two readings, by the line between two bounds."""
    if before.fault is not None or after.fault is not None:
        return None
    earlier, later = before.samples.buckets(name), after.samples.buckets(name)
    has_begun_anew = any(later.get(bound, 0.0) < count for bound, count in earlier.items())
    counts = [
        (bound, count - (0.0 if has_begun_anew else earlier.get(bound, 0.0)))
        for bound, count in sorted(later.items())
    ]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    wanted = share * total
    low_bound, low_count = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return low_bound  # all that is known: it was more
            within = (wanted - low_count) / (count - low_count) if count > low_count else 1.0
            return low_bound + within * (bound - low_bound)
        low_bound, low_count = bound, count
    return low_bound
