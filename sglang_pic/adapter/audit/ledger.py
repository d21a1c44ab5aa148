"""What audits say of each namespace, and the switch that turns splicing off where they disagree too much.

Owns the windows of audited requests, the generation of a namespace and the numbers by which an operator names one that
is off. Values in, values out: no clock, no chance, no device, so that every rank decides alike. It must not know how a
request is audited.

Namespaces of few requests (a salt for each user) may never have enough audits to be judged one by one. Those audits go
into one more window, over all such namespaces. It switches nothing off: it cannot say whose requests are bad, and one
tenant with many salts could switch off everybody's. Whoever watches is told.

A generation is part of a namespace's key in the tree (`namespace.tree_key`): a namespace that is switched on again
begins with an empty one, so that no row of the time before is ever served.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from sglang_pic.adapter.namespace import Namespace

__all__ = ["AuditLedger", "AuditLimits", "Suspension", "Undecided"]

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


class Undecided(NamedTuple):
    """The last audited requests of namespaces that have too few of their own to be judged."""

    kl: float
    """Capped mean, in nats, without the namespace that adds most to it: one alone is for its own window to judge."""
    num_audited: int
    num_agreed: int
    num_namespaces: int


class _Entry(NamedTuple):
    namespace: Namespace
    kl: float
    agreed: bool


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
    _undecided: deque[_Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._undecided = deque(maxlen=self.limits.window)

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
        self._enter_undecided(_Entry(namespace, kl, agreed), len(record.window))
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
        self._undecided.clear()

    @property
    def suspensions(self) -> list[Suspension]:
        """The namespaces that are off, the longest one first."""
        found = [record.suspension for record in self._records.values() if record.suspension is not None]
        return sorted(found, key=lambda suspension: suspension.number)

    def worst(self) -> float:
        """The largest mean of any window that decides, in nats; 0 where there is none."""
        windows = [record.window for record in self._records.values() if len(record.window) >= self.limits.least]
        return max(map(self._mean, windows), default=0.0)

    @property
    def undecided(self) -> Undecided | None:
        """The window of namespaces with too few audits to be judged; `None` until it holds enough to say something."""
        entries = self._undecided
        if len(entries) < self.limits.least:
            return None
        return Undecided(
            kl=self._lowest_mean(entries),
            num_audited=len(entries),
            num_agreed=sum(entry.agreed for entry in entries),
            num_namespaces=len({entry.namespace for entry in entries}),
        )

    def _lowest_mean(self, entries: Iterable[_Entry]) -> float:
        """The lowest of the means that leaving one namespace out gives; 0 where there is only one."""
        capped: dict[Namespace, list[float]] = {}
        for entry in entries:
            capped.setdefault(entry.namespace, []).append(min(entry.kl, self.limits.cap))
        means = []
        for left_out in capped:
            rest = [kl for namespace, kls in capped.items() if namespace != left_out for kl in kls]
            means.append(sum(rest) / max(1, len(rest)))
        return min(means)

    def _enter_undecided(self, entry: _Entry, num_audited: int) -> None:
        if num_audited < self.limits.least:
            self._undecided.append(entry)
        elif num_audited == self.limits.least:
            # From here on its own window speaks for it.
            others = [other for other in self._undecided if other.namespace != entry.namespace]
            self._undecided = deque(others, maxlen=self.limits.window)

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
