"""The audited requests of each namespace, and the switch that turns splicing off where they differ too much.

It uses no clock, no random numbers and no device, so every rank decides alike.

A namespace has three windows: one for requests spliced after a changed field, which are drawn more often; one for
requests that inherit spliced rows, which may be far more; one for the others. In a common mean one kind could hide the
errors of another. Each window alone switches the namespace off.

A namespace of few requests may never have `audit_min` audits. It is never switched off.

A generation is part of a namespace's key in the tree (`namespace.tree_key`): a namespace that is switched on again
starts empty, so no row from before is served.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.config import PicConfig
from sglang_pic.core import Reason

MAX_NAMESPACES = 1024
"""Most remembered namespaces; the one audited longest ago is forgotten first, unless it was ever off."""


class Window(Reason):
    """A kind of audited requests, whose mean is taken separately."""

    PLAIN = "plain", "Spliced requests without a run after a changed field."
    CHANGED = "changed", "Requests spliced after a changed field."
    INHERITED = "inherited", "Requests that splice nothing, but whose prefix hit has approximate rows."


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that is off, and why, as `/server_info` shows it, without its secret salt."""

    number: int
    """Identifies it when it is switched on again; never reused."""
    extra_key: str | None
    has_salt: bool
    tenant: str
    """As the label of metrics (`Namespace.tenant`)."""
    window: Window
    """The window that exceeded the limit."""
    kl: float
    """Mean of the window in nats, each request counted up to `audit_kl_cap`."""
    num_audited: int
    """Requests in the window."""
    num_agreed: int
    """How many of them had the same likeliest token."""


class _Entry(NamedTuple):
    """One audited request; its KL is capped, so that no single request can exceed the limit."""

    kl: float
    agreed: bool


@dataclass(slots=True)
class _Record:
    windows: dict[Window, deque[_Entry]]
    generation: int = 0
    suspension: Suspension | None = None

    @property
    def is_kept(self) -> bool:
        """Whether forgetting this record would let earlier spliced rows be served."""
        return self.suspension is not None or self.generation > 0

    def clear(self) -> None:
        """Clear the windows."""
        for entries in self.windows.values():
            entries.clear()


class AuditLedger:
    """The audited namespaces; grows by one record a namespace, up to `max_namespaces`."""

    def __init__(self, config: PicConfig, max_namespaces: int = MAX_NAMESPACES) -> None:
        self._config, self._max_namespaces = config, max_namespaces
        self._records: OrderedDict[Namespace, _Record] = OrderedDict()
        self._num_suspensions = 0

    def is_on(self, namespace: Namespace) -> bool:
        """Whether requests of `namespace` may be spliced; O(1).

        A namespace without a record is off if no further record fits, because it could not be audited.
        """
        record = self._records.get(namespace)
        if record is None:
            return len(self._records) < self._max_namespaces or self._forgettable() is not None
        return record.suspension is None

    def generation(self, namespace: Namespace) -> int:
        """How often `namespace` was switched on again."""
        record = self._records.get(namespace)
        return 0 if record is None else record.generation

    def observe(
        self, namespace: Namespace, generation: int, kl: float, *, agreed: bool, window: Window = Window.PLAIN
    ) -> Suspension | None:
        """Add one audited request, and switch its namespace off if its window is above the limit.

        Args:
            namespace: the request's.
            generation: the request's; requests of earlier generations are ignored.
            kl: KL(full || spliced) of the first token, in nats.
            agreed: whether both had the same likeliest token.
            window: the window that receives the request.

        Returns:
            The suspension, if this request caused one.
        """
        record = self._record(namespace)
        if record is None or record.suspension is not None or record.generation != generation:
            return None
        entries = record.windows[window]
        entries.append(_Entry(min(kl, self._config.audit_kl_cap), agreed))
        mean = _mean(entries)
        if len(entries) < self._config.audit_min or mean <= self._config.audit_kl_limit:
            return None
        self._num_suspensions += 1
        record.suspension = Suspension(
            number=self._num_suspensions,
            extra_key=namespace.extra_key,
            has_salt=namespace.cache_salt is not None,
            tenant=namespace.tenant,
            window=window,
            kl=mean,
            num_audited=len(entries),
            num_agreed=sum(entry.agreed for entry in entries),
        )
        return record.suspension

    def resume(self, number: int) -> list[Suspension]:
        """Switch a namespace on again, in a new generation and with empty windows.

        Args:
            number: the suspension's; 0 for all.

        Returns:
            The suspensions that ended; empty if none has the number.
        """
        ended = []
        for record in self._records.values():
            if record.suspension is not None and number in (0, record.suspension.number):
                ended.append(record.suspension)
                record.suspension = None
                record.generation += 1
                record.clear()
        return ended

    def renew(self) -> None:
        """Clear the windows after a change of weights; suspensions and generations stay."""
        for namespace, record in list(self._records.items()):
            record.clear()
            if not record.is_kept:
                del self._records[namespace]

    def flush(self) -> None:
        """Clear windows and generations after the tree was emptied; suspensions stay."""
        for record in self._records.values():
            record.generation = 0
        self.renew()

    @property
    def suspensions(self) -> list[Suspension]:
        """The namespaces that are off, oldest first."""
        found = [record.suspension for record in self._records.values() if record.suspension is not None]
        return sorted(found, key=lambda suspension: suspension.number)

    def worst(self, window: Window = Window.PLAIN) -> float:
        """The largest mean of any namespace's window with `audit_min` requests, in nats; 0 if there is none."""
        least = self._config.audit_min
        windows = [record.windows[window] for record in self._records.values()]
        return max((_mean(entries) for entries in windows if len(entries) >= least), default=0.0)

    def _record(self, namespace: Namespace) -> _Record | None:
        record = self._records.get(namespace)
        if record is None:
            if len(self._records) >= self._max_namespaces:
                oldest = self._forgettable()
                if oldest is None:
                    return None
                del self._records[oldest]
            windows = {window: deque[_Entry](maxlen=self._config.audit_window) for window in Window}
            record = self._records[namespace] = _Record(windows)
        self._records.move_to_end(namespace)
        return record

    def _forgettable(self) -> Namespace | None:
        return next((name for name, record in self._records.items() if not record.is_kept), None)


def _mean(entries: Iterable[_Entry]) -> float:
    kls = [entry.kl for entry in entries]
    return sum(kls) / max(1, len(kls))
