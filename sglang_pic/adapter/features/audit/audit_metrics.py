"""The metrics of the audit, and the reasons why drawn requests are not audited.

Tokens that audits compute belong to no request and are counted only here.
"""

from __future__ import annotations

from typing import Final

from sglang_pic.adapter.features.audit.ledger import Window
from sglang_pic.adapter.metrics import Metric, MetricKind, descriptions
from sglang_pic.core import Reason


class AuditSkip(Reason):
    """Why a request that was drawn for an audit was not audited."""

    ADAPTER = "adapter", "Its LoRA adapter was not on the device any more, or adapters load beside forward passes."
    FLUSHED = "flushed", "The cache was flushed or the weights changed before the full computation was done."
    FULL_NOT_FINITE = "full_not_finite", "The full computation gave NaN or infinite logits: nothing to compare with."
    MEDIA = "media", "Its prompt has images; an audit computes token ids only."
    MEMORY = "memory", "The KV pool had too few free or evictable slots for the prompt."
    NO_LOGITS = "no_logits", "SGLang scored several items at once, which gives no logits of a first token."
    PREEMPTED = "preempted", "Requests needed the slots of the full computation several times."
    QUEUE_FULL = "queue_full", "The server was too busy to audit the requests drawn before this one."
    SUSPENDED = "suspended", "Splicing was switched off in the request's namespace meanwhile."
    TOO_LONG = "too_long", "The prompt needs more than a quarter of the KV pool, and would evict reusable rows."
    WEIGHTS = "weights", "Since the weights changed the cache was not flushed: its rows may be of other weights."


AUDITED: Final = Metric(
    "sglang:pic_audited_requests_total",
    MetricKind.COUNTER,
    "Requests on spliced rows that were computed again in full, by whether the likeliest first token was the same.",
    label="verdict",
    values={"agree": "The same.", "disagree": "Another."},
)
KL: Final = Metric(
    "sglang:pic_audit_kl_nats",
    MetricKind.HISTOGRAM,
    "KL(full || spliced) of the first token of audited requests, in nats.",
    label="window",
    values=descriptions(Window),
    # From rounding (.0001) to another text (several nats).
    buckets=(1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
SKIPPED: Final = Metric(
    "sglang:pic_audit_skipped_requests_total",
    MetricKind.COUNTER,
    "Requests drawn for an audit and not audited, by reason.",
    label="reason",
    values=descriptions(AuditSkip),
)
TOKENS: Final = Metric(
    "sglang:pic_audit_tokens_total",
    MetricKind.COUNTER,
    "Tokens that audits computed, those of unfinished audits included. No other counter includes them.",
)
SUSPENDED: Final = Metric(
    "sglang:pic_audit_suspended_namespaces",
    MetricKind.GAUGE,
    "Namespaces in which audits have switched splicing off, by the window that exceeded the limit.",
    label="window",
    values=descriptions(Window),
)
WORST_KL: Final = Metric(
    "sglang:pic_audit_worst_kl_nats",
    MetricKind.GAUGE,
    "Largest mean KL of a namespace's last audited requests, each counted up to audit_kl_cap, by window; 0 until a "
    "namespace has audit_min such requests.",
    label="window",
    values=descriptions(Window),
)
LIMIT: Final = Metric(
    "sglang:pic_audit_kl_limit_nats",
    MetricKind.GAUGE,
    "The mean KL above which a namespace is switched off (audit_kl_limit), in nats.",
)

METRICS: Final = (
    AUDITED,
    KL,
    SKIPPED,
    TOKENS,
    SUSPENDED,
    WORST_KL,
    LIMIT,
)
