"""What operators hear of the audit: its part of `/server_info`, and its lines in the log.

Owns the words. It must not know when any of them is said.
"""

from __future__ import annotations

import logging

import msgspec

from sglang_pic.adapter.audit.ledger import AuditLimits, Suspension, Undecided
from sglang_pic.adapter.namespace import Namespace

__all__ = [
    "RESUME_KEY",
    "AuditReport",
    "SuspendedNamespace",
    "UndecidedNamespaces",
    "log_resumption",
    "log_suspension",
    "log_undecided",
]

logger = logging.getLogger(__name__)

RESUME_KEY = "pic_audit_resume"
"""What `/set_internal_state` takes: the number of a suspension, 0 for all."""


class SuspendedNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that is off, as `/server_info` shows it; the salt is a secret, and is not shown."""

    number: int
    extra_key: str | None
    has_salt: bool
    kl: float
    num_audited: int
    num_agreed: int


class UndecidedNamespaces(msgspec.Struct, frozen=True, kw_only=True):
    """Namespaces that have too few audited requests to be judged, together, as `/server_info` shows them."""

    kl: float
    """Of their last audited requests, in nats, each counted up to `audit_kl_cap`; without the namespace that adds
    most."""
    is_above_limit: bool
    num_audited: int
    num_agreed: int
    num_namespaces: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The audit's part of `/server_info`."""

    rate: float
    kl_limit: float
    num_audited: int
    num_agreed: int
    num_skipped: int
    num_pending: int
    mean_kl: float
    """Of all audited requests, in nats, each counted up to `audit_kl_cap`."""
    worst_window_kl: float
    undecided: UndecidedNamespaces | None
    """`None` until there are `audit_min` such requests."""
    suspended: list[SuspendedNamespace]


def log_suspension(suspension: Suspension, limits: AuditLimits) -> None:
    """Say that a namespace was switched off, why, and how to switch it on."""
    logger.error(
        "sglang_pic: SPLICING IS OFF in namespace %d, %s: over the last %d audited requests KL(full || spliced) of "
        "the first token is %.3f nats on average, each counted up to %s; audit_kl_limit is %s; %d of them agree on "
        "the likeliest token. Its requests are computed in full from here on. To switch it on again: POST "
        '/set_internal_state {"server_args": {"%s": %d}}',
        suspension.number,
        _describe(suspension.namespace),
        suspension.num_audited,
        suspension.kl,
        limits.cap,
        limits.kl,
        suspension.num_agreed,
        RESUME_KEY,
        suspension.number,
    )


def log_undecided(undecided: Undecided, limits: AuditLimits) -> None:
    """Say that namespaces which have too few audits to be judged are too far off together."""
    logger.error(
        "sglang_pic: SPLICES ARE FAR OFF in %d namespaces together: over their last %d audited requests KL(full || "
        "spliced) of the first token is %.3f nats on average even without the worst namespace, each counted up to %s; "
        "audit_kl_limit is %s; %d of them agree on the likeliest token. No single namespace has the %d audited "
        "requests (audit_min) that decide, so SPLICING STAYS ON. Raise audit_rate or lower audit_min to have each "
        "judged, or serve without --radix-cache-backend pic.",
        undecided.num_namespaces,
        undecided.num_audited,
        undecided.kl,
        limits.cap,
        limits.kl,
        undecided.num_agreed,
        limits.least,
    )


def log_resumption(suspension: Suspension) -> None:
    """Say that a namespace was switched on again."""
    logger.warning(
        "sglang_pic: splicing is on again in namespace %d, %s", suspension.number, _describe(suspension.namespace)
    )


def _describe(namespace: Namespace) -> str:
    extra_key, cache_salt = namespace
    return f"extra_key={extra_key!r}, {'with' if cache_salt is not None else 'no'} cache_salt"
