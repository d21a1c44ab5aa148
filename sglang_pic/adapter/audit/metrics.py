"""Counters of the audit for `/metrics`, and the closed set of reasons why a sampled request was not audited.

Audits are requests of nobody: what they compute is counted here, and nowhere else. It must not import
`prometheus_client` before SGLang has chosen its multiprocess directory: the counters are made when the cache is.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["AuditMetrics", "AuditSkip"]

# From rounding alone (.0001) to another text altogether (several nats).
_KL_BUCKETS = (1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class AuditSkip(Enum):
    """Why a request that was drawn for an audit was not audited."""

    FLUSHED = "flushed"
    """The cache was flushed or the weights changed before the full computation was done."""
    FULL_NOT_FINITE = "full_not_finite"
    """The full computation gave no distribution, so there is nothing to compare with."""
    MEMORY = "memory"
    """The pool had no room for the prompt beside the rows in use."""
    NO_LOGITS = "no_logits"
    """Its batch was scored by SGLang's scoring of several items, which forms no logits of a first token."""
    PREEMPTED = "preempted"
    """Requests needed the slots, several times over."""
    QUEUE_FULL = "queue_full"
    """The server was too busy to audit those drawn before it."""
    SUSPENDED = "suspended"
    """Its namespace was switched off meanwhile."""
    TOO_LONG = "too_long"
    """The prompt would take more than a quarter of the pool, and with it the rows that others come back to."""


class AuditMetrics:
    """The audit's counters of one scheduler rank; without labels it counts nothing.

    Args:
        labels: rank labels of every series, or `None` where the server exports no metrics or another rank does.
    """

    def __init__(self, labels: dict[str, str] | None) -> None:
        self._labels = labels
        if labels is None:
            return
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)
        self._audited = Counter(
            "sglang:pic_audited_requests_total",
            "Spliced requests computed again in full, by whether the first token's likeliest choice was the same.",
            [*names, "verdict"],
        )
        self._kl = Histogram(
            "sglang:pic_audit_kl_nats",
            "KL(full || spliced) of the first token of audited requests, in nats.",
            names,
            buckets=_KL_BUCKETS,
        )
        self._skipped = Counter(
            "sglang:pic_audit_skipped_requests_total",
            "Spliced requests that were drawn for an audit and not audited, by reason.",
            [*names, "reason"],
        )
        self._tokens = Counter(
            "sglang:pic_audit_tokens_total",
            "Tokens computed by audits, also those computed in vain. They are in no other counter.",
            names,
        )
        self._suspended = Gauge(
            "sglang:pic_audit_suspended_namespaces",
            "Namespaces in which audits have switched splicing off.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._undecided_kl = Gauge(
            "sglang:pic_audit_undecided_kl_nats",
            "Mean KL of the last audited requests of namespaces that have too few of them to be judged, each counted "
            "up to audit_kl_cap, without the namespace that adds most; 0 until there are audit_min of them.",
            names,
            multiprocess_mode="mostrecent",
        )
        for verdict in ("agree", "disagree"):
            self._audited.labels(**labels, verdict=verdict)
        for reason in AuditSkip:
            self._skipped.labels(**labels, reason=reason.value)
        self._kl.labels(**labels)
        self._tokens.labels(**labels)
        self._suspended.labels(**labels).set(0)
        self._undecided_kl.labels(**labels).set(0)

    def count_audited(self, kl: float, *, agreed: bool) -> None:
        """Count one verdict; `kl` in nats."""
        if self._labels is not None:
            self._audited.labels(**self._labels, verdict="agree" if agreed else "disagree").inc()
            self._kl.labels(**self._labels).observe(kl)

    def count_skipped(self, reason: AuditSkip, count: int = 1) -> None:
        """Count requests that were drawn and not audited."""
        if self._labels is not None and count:
            self._skipped.labels(**self._labels, reason=reason.value).inc(count)

    def count_tokens(self, count: int) -> None:
        """Count tokens of one pass."""
        if self._labels is not None:
            self._tokens.labels(**self._labels).inc(count)

    def set_suspended(self, count: int) -> None:
        """Say how many namespaces are off."""
        if self._labels is not None:
            self._suspended.labels(**self._labels).set(count)

    def set_undecided_kl(self, kl: float) -> None:
        """Say how far off the requests of namespaces without a verdict are on average, in nats."""
        if self._labels is not None:
            self._undecided_kl.labels(**self._labels).set(kl)
