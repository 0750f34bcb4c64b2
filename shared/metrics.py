"""A daemon's metrics: a registry of its own, read as Prometheus text or as plain numbers.

Names follow Prometheus: `kvpair_`, then the thing, then its unit (`_seconds`, `_bytes`,
`_blocks`), and `_total` for what only grows.  A daemon declares each of its metrics once, on the
`Metrics` that its service holds; declaring a name twice is a bug and raises.

What is counted is counted by the event loop's thread, and read there too.  Nothing here waits
for I/O; what somebody else knows already (a queue's length) is read only when somebody asks.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_NAME = re.compile(r"kvpair(_[a-z0-9]+)+")

LATENCY_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""From a hand-off between two idle daemons, 100 µs, to a request's longest wait."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped upstream; when a series began is not told


class Metrics:
    """The metrics of one daemon.

    Args:
        daemon: Its name, which every series tells in a label where metrics leave the process, so
            that those of both daemons can lie side by side.  Empty for none.
    """

    def __init__(self, daemon: str = "") -> None:
        self._daemon = daemon
        self._registry = CollectorRegistry(auto_describe=True)
        if daemon:  # the process's memory, CPU time and descriptors, from /proc
            ProcessCollector(registry=self._registry)

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

    def gauges_from(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """Declare values that are read together when somebody asks: `read` returns them by label.

        All of them come from one moment, so those that must add up do.
        """
        self._registry.register(_ReadGauges(_checked(name), text, label, read))

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """Declare a distribution, of seconds unless `buckets` say otherwise."""
        return Histogram(_checked(name), text, labels, registry=self._registry, buckets=buckets)

    def distribution(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Distribution:
        """Declare a distribution in which one value may count many times at once."""
        distribution = Distribution(_checked(name), text, buckets)
        self._registry.register(distribution)
        return distribution

    def snapshot(self) -> dict[str, float]:
        """Return every counter's value by its name, labels in braces; what STATUS tells."""
        return {
            _series(sample.name, sample.labels): sample.value
            for metric in self._registry.collect()
            if metric.type == "counter" and metric.name.startswith("kvpair_")
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def exposition(self) -> str:
        """Return all metrics in Prometheus' text format; what METRICS tells."""
        return self.encoded("")[0].decode()

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that an HTTP Accept header asks for, and its type."""
        encode, content_type = choose_encoder(accept)
        return encode(_Labelled(self._registry, self._daemon)), content_type


class Distribution(Collector):
    """A histogram whose `observe` takes a value and how many times it was seen.

    A step of a batch makes all its streams wait equally long: one call counts them all.

    Args:
        name: The metric's name.
        text: What it is.
        buckets: Upper bounds, rising.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = (*buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        """Yield the counts up to each bound."""
        cumulated = [
            ("+Inf" if bound == float("inf") else str(bound), float(count))
            for bound, count in zip(self._bounds, accumulate(self._counts), strict=True)
        ]
        yield HistogramMetricFamily(self._name, self._text, buckets=cumulated, sum_value=self._sum)


class _Labelled:
    """A registry in which every series carries the daemon's name."""

    def __init__(self, registry: CollectorRegistry, daemon: str) -> None:
        self._registry, self._daemon = registry, daemon

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if self._daemon:
                metric.samples = [
                    Sample(
                        sample.name,
                        {"daemon": self._daemon, **sample.labels},
                        sample.value,
                        sample.timestamp,
                        sample.exemplar,
                    )
                    for sample in metric.samples
                ]
            yield metric


class _ReadCounter(Collector):
    """A counter whose value lives elsewhere."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        """Yield the present value."""
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class _ReadGauges(Collector):
    """Gauges of one label whose values live elsewhere."""

    def __init__(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._text, self._label, self._read = name, text, label, read

    def describe(self) -> Iterable[Metric]:
        """Name the metric without reading it: its owner may still be being built."""
        yield GaugeMetricFamily(self._name, self._text, labels=[self._label])

    def collect(self) -> Iterable[Metric]:
        """Yield the present values."""
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for label, value in self._read().items():
            family.add_metric([label], value)
        yield family


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
