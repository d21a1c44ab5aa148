"""Metrics are declared once and exported from the declaration, every value of a label from the start."""

from __future__ import annotations

from functools import partial

import pytest

from sglang_pic.adapter.audit import metrics as audit
from sglang_pic.adapter.metrics import Metric, MetricKind, Series

prometheus = pytest.importorskip("prometheus_client")

LABELS = {"model_name": "m", "tp_rank": "0"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> object:
    """An empty registry in place of the process's own."""
    registry = prometheus.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus, kind, partial(getattr(prometheus, kind), registry=registry))
    return registry


def samples(registry: object) -> dict[tuple[str, str | None], float]:
    """Every number by name and by its own label's value."""
    found = {}
    for family in registry.collect():  # type: ignore[attr-defined]
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in LABELS]
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            found[sample.name, own[0] if own else None] = sample.value
    return found


def buckets(registry: object, bound: str) -> float:
    """What the audit's histogram has counted up to a bound, in all windows."""
    found = [s for family in registry.collect() for s in family.samples if s.name == f"{audit.KL.name}_bucket"]  # type: ignore[attr-defined]
    return sum(sample.value for sample in found if sample.labels["le"] == bound)


def test_every_value_of_a_label_is_exported_from_the_start(registry: object) -> None:
    series = Series(audit.METRICS, LABELS)
    before = samples(registry)
    for reason in audit.AuditSkip:
        assert before[audit.SKIPPED.name, reason.value] == 0
    assert before[audit.UNDECIDED_KL.name, None] == 0
    series.add(audit.SKIPPED, 3, value="memory")
    series.add(audit.TOKENS, 256)
    series.set(audit.UNDECIDED_KL, 0.2)
    series.set(audit.SUSPENDED, 2, value="changed")
    series.observe(audit.KL, 0.02, value="plain")
    after = samples(registry)
    assert after[audit.SKIPPED.name, "memory"] == 3
    assert after[audit.TOKENS.name, None] == 256
    assert after[audit.UNDECIDED_KL.name, None] == 0.2
    assert (after[audit.SUSPENDED.name, "changed"], after[audit.SUSPENDED.name, "plain"]) == (2, 0)
    assert (after[f"{audit.KL.name}_count", "plain"], after[f"{audit.KL.name}_count", "changed"]) == (1, 0)
    assert (buckets(registry, "0.01"), buckets(registry, "0.03")) == (0, 1)


def test_a_value_that_is_not_declared_is_an_error(registry: object) -> None:
    series = Series([Metric("a_total", MetricKind.COUNTER, "help", label="reason", values={"x": "because"})], LABELS)
    with pytest.raises(KeyError):
        series.add(Metric("a_total", MetricKind.COUNTER, "help"), value="y")


def test_without_labels_nothing_is_exported(registry: object) -> None:
    series = Series(audit.METRICS, None)
    series.add(audit.SKIPPED, value="memory")
    series.set(audit.SUSPENDED, 2)
    series.observe(audit.KL, 0.02)
    assert samples(registry) == {}
