"""A daemon's metrics: a registry of its own, read as Prometheus text or as plain numbers.

Names follow Prometheus: `kvpair_`, then the thing, then its unit (`_seconds`, `_bytes`,
`_blocks`), and `_total` for what only grows.  A daemon declares each of its metrics once, at
its start, on the `Metrics` that its service holds; declaring a name twice is a bug and raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_NAME = re.compile(r"kvpair(_[a-z0-9]+)+")

LATENCY_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""From a hand-off between two idle daemons, 100 µs, to a request's longest wait."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped upstream; when a series began is not told


class Metrics:
    """The metrics of one daemon."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a count that only grows; its name ends in `_total`."""
        return Counter(_checked(name, is_counter=True), text, labels, registry=self._registry)

    def counter_from(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Declare a count that somebody else keeps: `read` returns it."""
        self._registry.register(_ReadCounter(_checked(name, is_counter=True), text, read))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a value that rises and falls."""
        return Gauge(_checked(name), text, labels, registry=self._registry)

    def gauge_from(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Declare a value that is read when somebody asks."""
        self.gauge(name, text).set_function(read)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """Declare a distribution, of seconds unless `buckets` say otherwise."""
        return Histogram(_checked(name), text, labels, registry=self._registry, buckets=buckets)

    def snapshot(self) -> dict[str, float]:
        """Return every counter's value by its name, labels in braces; what STATUS tells."""
        return {
            _series(sample.name, sample.labels): sample.value
            for metric in self._registry.collect()
            if metric.type == "counter"
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def exposition(self) -> str:
        """Return all metrics in Prometheus' text format; what METRICS tells."""
        return generate_latest(self._registry).decode()


class _ReadCounter(Collector):
    """A counter whose value lives elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        """Yield the present value."""
        yield CounterMetricFamily(self._name, self._text, value=self._read())


def _checked(name: str, *, is_counter: bool = False) -> str:
    """Return a name that keeps the rules; raise ValueError for one that does not."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the metric {name!r} is not of the form kvpair_thing_unit")
    if is_counter != name.endswith("_total"):
        raise ValueError(f"the metric {name!r}: counters, and only they, end in _total")
    return name


def _series(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
