"""The audit's part of `/server_info`, and its lines in the log."""

from __future__ import annotations

import logging

import msgspec

from sglang_pic.adapter.features.audit.ledger import Suspension, Window
from sglang_pic.config import PicConfig

logger = logging.getLogger(__name__)

_KINDS = {
    Window.PLAIN: "without a changed field",
    Window.CHANGED: "after a changed field",
    Window.INHERITED: "that splice nothing and inherit spliced rows",
}

RESUME_KEY = "pic_audit_resume"
"""The key of `/set_internal_state`, with the number of a suspension, or 0 for all."""


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """The audited requests of one kind, in all namespaces together."""

    num_audited: int
    num_agreed: int
    mean_kl: float
    """In nats, each request counted up to `audit_kl_cap`."""
    worst_window_kl: float
    """The largest mean of one namespace's window; 0 until a namespace has `audit_min` such requests."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The audit's part of `/server_info`."""

    num_audited: int
    num_agreed: int
    num_skipped: int
    num_pending: int
    mean_kl: float
    """Mean of all audited requests, in nats, each counted up to `audit_kl_cap`."""
    worst_window_kl: float
    """The largest of the windows' `worst_window_kl`."""
    windows: dict[Window, WindowReport]
    suspended: list[Suspension]


def log_suspension(suspension: Suspension, config: PicConfig, *, sends_rows: bool) -> None:
    """Log that a namespace was switched off, why, and how to switch it on; `sends_rows`: to decode servers."""
    logger.error(
        "sglang_pic: SPLICING IS OFF in namespace %d, %s: over the last %d audited requests %s KL(full || spliced) of "
        "the first token is %.3f nats on average, each counted up to %s; audit_kl_limit is %s; %d of them agree on "
        "the likeliest token. Its requests are computed in full from here on. To switch it on again: POST "
        '/set_internal_state {"server_args": {"%s": %d}}%s%s',
        suspension.number,
        _describe(suspension),
        suspension.num_audited,
        _KINDS[suspension.window],
        suspension.kl,
        config.audit_kl_cap,
        config.audit_kl_limit,
        suspension.num_agreed,
        RESUME_KEY,
        suspension.number,
        '; to compute everything after a changed field: core.edit "recompile"'
        if suspension.window is Window.CHANGED
        else "",
        "; decode servers may keep earlier spliced rows: POST /flush_cache to them" if sends_rows else "",
    )


def log_resumption(suspension: Suspension) -> None:
    """Log that a namespace was switched on again."""
    logger.warning("sglang_pic: splicing is on again in namespace %d, %s", suspension.number, _describe(suspension))


def _describe(suspension: Suspension) -> str:
    salt = "with" if suspension.has_salt else "no"
    return f"extra_key={suspension.extra_key!r}, {salt} cache_salt, tenant {suspension.tenant}"
