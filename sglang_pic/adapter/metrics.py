"""Declares and exports metrics.

A metric is declared once, as data, beside the code that counts it, so that pages can list all metrics without a server.
`Series` exports declared metrics for one scheduler rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from sglang_pic.core import Reason

MAX_VALUES: Final = 64
"""Most values of a label that is not listed in its metric."""

OTHER: Final = "other"
"""The value of such a label for all further ones."""


class MetricKind(Enum):
    """The type of a metric in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def descriptions(reasons: Iterable[Reason]) -> dict[str, str]:
    """The description of each reason by its label, for `Metric.values`."""
    return {reason.value: reason.description for reason in reasons}


class Metric(NamedTuple):
    """The declaration of one metric. Every metric also has SGLang's rank labels."""

    name: str
    kind: MetricKind
    help: str
    label: str | None = None
    """A further label."""
    values: Mapping[str, str] = MappingProxyType({})
    """Every value of `label`, with its meaning. If empty, the first `MAX_VALUES` values that are used are exported, and
    all others as `OTHER`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, for a histogram."""


class Series:
    """The metrics of one scheduler rank, at zero from the start; with no labels nothing is exported.

    NOTE: `prometheus_client` must not be imported before SGLang has chosen its multiprocess directory, so a `Series` is
    made when the cache is made.

    Args:
        metrics: the declared metrics.
        labels: the rank labels of every series, or `None` if the server exports no metrics or another rank does.
    """

    def __init__(self, metrics: Iterable[Metric], labels: Mapping[str, str] | None) -> None:
        self._children: dict[tuple[str, str | None], _Child] = {}
        self._open: dict[str, tuple[Callable[[str], _Child], set[str]]] = {}
        """By metric: makes the series of a value, and the values that have one."""
        if labels is None:
            return
        import prometheus_client

        makers: dict[MetricKind, Callable[..., Any]] = {
            MetricKind.COUNTER: prometheus_client.Counter,
            MetricKind.GAUGE: partial(prometheus_client.Gauge, multiprocess_mode="mostrecent"),
            MetricKind.HISTOGRAM: prometheus_client.Histogram,
        }
        for metric in metrics:
            options = {"buckets": metric.buckets} if metric.buckets else {}
            names = [*labels, metric.label] if metric.label else [*labels]
            family = makers[metric.kind](metric.name, metric.help, names, **options)
            if metric.label and not metric.values:
                self._open[metric.name] = partial(family.labels, *labels.values()), set()
                continue
            for value in metric.values or (None,):
                child = family.labels(*labels.values(), *([] if value is None else [value]))
                self._children[metric.name, value] = child
                if metric.kind is MetricKind.GAUGE:
                    child.set(0)

    def add(self, metric: Metric, amount: float = 1, *, value: str | None = None) -> None:
        """Add to a counter; `value` is that of the metric's own label."""
        if (child := self._child(metric, value)) is not None:
            child.inc(amount)

    def set(self, metric: Metric, amount: float, *, value: str | None = None) -> None:
        """Set a gauge."""
        if (child := self._child(metric, value)) is not None:
            child.set(amount)

    def observe(self, metric: Metric, amount: float, *, value: str | None = None) -> None:
        """Add one observation to a histogram."""
        if (child := self._child(metric, value)) is not None:
            child.observe(amount)

    def _child(self, metric: Metric, value: str | None) -> _Child | None:
        """The series of a value; None if nothing is exported."""
        if value is not None and metric.name in self._open:
            make, values = self._open[metric.name]
            value = value if value in values or len(values) < MAX_VALUES else OTHER
            if value not in values:
                values.add(value)
                self._children[metric.name, value] = make(value)
        return self._children[metric.name, value] if self._children else None


class _Child(Protocol):
    """The methods of counters, gauges and histograms; each has some of them."""

    def inc(self, amount: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, amount: float) -> None: ...
