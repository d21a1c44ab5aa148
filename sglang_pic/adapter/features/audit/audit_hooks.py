"""Makes the audit, and its hooks: steps between rounds, weights that are about to change, the operator's switch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_pic.adapter import server_info
from sglang_pic.adapter.features.audit.audit import Audit
from sglang_pic.adapter.features.audit.report import RESUME_KEY
from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import BuildContext, Scheduler
from sglang_pic.adapter.support import disaggregation_mode

logger = logging.getLogger(__name__)


def make(ctx: BuildContext, parts: Parts) -> Audit | None:
    """The audit with its hooks; `None` if `audit_rate` is 0, or with DP attention."""
    stations, sends_rows = parts.stations, disaggregation_mode(ctx) == "prefill"
    if not stations.config.audit_rate:
        return None
    if stations.ranks is not ctx.tp_group:
        if ctx.tp_rank == 0:
            logger.info("sglang_pic: audits are off with DP attention: the pass of an audit would need every rank")
        return None
    audit = Audit(parts.live.runner, stations, ctx.tp_group, sends_rows=sends_rows)
    install(audit)
    return audit


def install(audit: Audit) -> None:
    """Register the hooks; SGLang applies them later."""

    def refuse(value: float) -> str:
        known = [suspended.number for suspended in audit.report().suspended]
        if value == 0 or value in known:
            return ""
        return f"no namespace that is off has this number; use {known or 'none'}, or 0 for all."

    def resume(value: float) -> None:
        audit.resume(int(value))

    def sleep(original: Callable[..., None], scheduler: Scheduler) -> None:
        if not audit.has_work:
            original(scheduler)

    def after_result(_: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        audit.step_if_due(scheduler)

    def before_weights(*_: object, **__: object) -> None:
        audit.abandon()

    server_info.take(RESUME_KEY, refuse, resume)
    hook(__name__, "Scheduler.on_idle", audit.step_if_idle)
    hook(__name__, "Scheduler.maybe_sleep_on_idle", sleep)
    hook(__name__, "Scheduler.process_batch_result", after_result)
    # NOTE: SGLang regards a server with waiting audits as idle. From here on its weights are freed or written.
    hook(__name__, "SchedulerWeightUpdaterManager.begin_weight_update", before_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.release_memory_occupation", before_weights)
