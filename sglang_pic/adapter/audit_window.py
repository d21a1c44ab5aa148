"""What audits say of each namespace, and the switch that turns splicing off where they disagree too much.

Owns the windows of audited requests, the generation of a namespace and the numbers by which an operator names one that
is off. Values in, values out: no clock, no chance, no device, so that every rank decides alike. It must not know how a
request is audited.

A generation is part of a namespace's key in the tree (`options.renewed_key`): a namespace that is switched on again
begins with an empty one, so that no row of the time before is ever served.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sglang_pic.adapter.request_state import Namespace

__all__ = ["AuditLedger", "AuditLimits", "Suspension"]

MAX_NAMESPACES = 1024
"""Namespaces that are remembered; the one audited longest ago is forgotten first, unless it was ever off."""


class AuditLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a namespace is switched off."""

    kl: float
    """Nats: the largest mean of a window that is tolerated."""
    cap: float
    """Nats: what one audited request counts at most, so that no single one decides."""
    window: int
    """Audited requests of a namespace that are looked at, the last ones."""
    least: int
    """Audited requests that a window must hold before it decides."""


class Suspension(NamedTuple):
    """A namespace that is off, and why."""

    number: int
    """By which the operator switches it on again; never given twice."""
    namespace: Namespace
    kl: float
    """Capped mean of the window, in nats."""
    num_audited: int
    """Requests in the window."""
    num_agreed: int
    """How many of them had the same likeliest token."""


@dataclass(slots=True)
class _Record:
    window: deque[tuple[float, bool]]
    generation: int = 0
    suspension: Suspension | None = None

    @property
    def is_kept(self) -> bool:
        """Whether forgetting it would serve rows that must not be served."""
        return self.suspension is not None or self.generation > 0


@dataclass(slots=True)
class AuditLedger:
    """The namespaces that were audited. Grows by one record a namespace, up to `max_namespaces`."""

    limits: AuditLimits
    max_namespaces: int = MAX_NAMESPACES
    _records: OrderedDict[Namespace, _Record] = field(default_factory=OrderedDict)
    _num_suspensions: int = 0

    def is_on(self, namespace: Namespace) -> bool:
        """Whether requests of `namespace` may be spliced; O(1).

        Where every record that fits must be kept, a namespace that has none cannot be watched, and is off.
        """
        record = self._records.get(namespace)
        if record is None:
            return len(self._records) < self.max_namespaces or self._forgettable() is not None
        return record.suspension is None

    def generation(self, namespace: Namespace) -> int:
        """How often `namespace` was switched on again."""
        record = self._records.get(namespace)
        return 0 if record is None else record.generation

    def observe(self, namespace: Namespace, generation: int, kl: float, *, agreed: bool) -> Suspension | None:
        """Enter one audited request, and switch its namespace off if that fills the measure.

        Args:
            namespace: the request's.
            generation: the one it was spliced in; an earlier one than the present is past, and is not entered.
            kl: KL(full || spliced) of the first token, in nats.
            agreed: whether both had the same likeliest token.

        Returns:
            The suspension, if this request brought it about.
        """
        record = self._record(namespace)
        if record is None or record.suspension is not None or record.generation != generation:
            return None
        record.window.append((kl, agreed))
        mean = self._mean(record.window)
        if len(record.window) < self.limits.least or mean <= self.limits.kl:
            return None
        self._num_suspensions += 1
        num_agreed = sum(same for _, same in record.window)
        record.suspension = Suspension(self._num_suspensions, namespace, mean, len(record.window), num_agreed)
        return record.suspension

    def resume(self, number: int) -> list[Suspension]:
        """Switch a namespace on again, in a new generation and with an empty window.

        Args:
            number: of its suspension; 0 for every namespace that is off.

        Returns:
            What was ended; empty where the number names nothing that is off.
        """
        ended = []
        for record in self._records.values():
            if record.suspension is not None and number in (0, record.suspension.number):
                ended.append(record.suspension)
                record.suspension = None
                record.generation += 1
                record.window.clear()
        return ended

    def flush(self) -> None:
        """The tree is empty: windows and generations begin anew; what is off stays off."""
        for record in self._records.values():
            record.generation = 0
        self.clear_windows()

    def clear_windows(self) -> None:
        """What was audited says nothing of what comes; what is off stays off, and generations go on."""
        for namespace, record in list(self._records.items()):
            record.window.clear()
            if not record.is_kept:
                del self._records[namespace]

    @property
    def suspensions(self) -> list[Suspension]:
        """The namespaces that are off, the longest one first."""
        found = [record.suspension for record in self._records.values() if record.suspension is not None]
        return sorted(found, key=lambda suspension: suspension.number)

    def worst(self) -> float:
        """The largest mean of any window that decides, in nats; 0 where there is none."""
        windows = [record.window for record in self._records.values() if len(record.window) >= self.limits.least]
        return max(map(self._mean, windows), default=0.0)

    def _mean(self, window: deque[tuple[float, bool]]) -> float:
        return sum(min(kl, self.limits.cap) for kl, _ in window) / len(window)

    def _record(self, namespace: Namespace) -> _Record | None:
        record = self._records.get(namespace)
        if record is None:
            if len(self._records) >= self.max_namespaces:
                oldest = self._forgettable()
                if oldest is None:
                    return None
                del self._records[oldest]
            record = self._records[namespace] = _Record(deque(maxlen=self.limits.window))
        self._records.move_to_end(namespace)
        return record

    def _forgettable(self) -> Namespace | None:
        return next((name for name, record in self._records.items() if not record.is_kept), None)
