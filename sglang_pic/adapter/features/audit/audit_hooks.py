"""The audit's hooks: first tokens' logits, steps between rounds, new weights, the operator's switch."""

from __future__ import annotations

from collections.abc import Callable

from sglang_pic.adapter import server_info
from sglang_pic.adapter.features.audit.audit import DRAWN, Audit, is_drawn
from sglang_pic.adapter.features.audit.report import RESUME_KEY
from sglang_pic.adapter.sglang.hooks import hook
from sglang_pic.adapter.sglang.seams import Req, RunnerOutput, ScheduleBatch, Scheduler


class FirstTokens:
    """The observer of forward passes that passes the drawn requests' logits to `audit`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def watch(self, batch: ScheduleBatch) -> Callable[[RunnerOutput], None] | None:
        """Find the drawn requests of a batch by their places in it, which are those of their logits."""
        drawn: list[tuple[int, Req]] = []
        for place, req in enumerate(batch.reqs):
            # Not the pass of another chunk of a drawn request.
            if is_drawn(req.pic) and not req.output_ids:
                del req.pic.of_features[DRAWN]
                drawn.append((place, req))

        def keep(output: RunnerOutput) -> None:
            # NOTE: sampling changes the logits in place, later on this stream. Scoring of several items gives none.
            logits = output.logits_output.next_token_logits
            for place, req in drawn:
                self._audit.keep(req, None if logits is None else logits[place])

        return keep if drawn else None


def install(audit: Audit) -> None:
    """Register the hooks; SGLang applies them later."""
    server_info.take(RESUME_KEY, *_resumption(audit))
    _scheduler, _components = "managers.scheduler.Scheduler", "managers.scheduler_components"

    def sleep(original: Callable[..., None], scheduler: Scheduler) -> None:
        if not audit.has_work:
            original(scheduler)

    def after_result(_: None, scheduler: Scheduler, *args: object, **kwargs: object) -> None:
        audit.step_if_due(scheduler)

    def after_weights(*_: object, **__: object) -> None:
        audit.renew()

    def before_weights(*_: object, **__: object) -> None:
        audit.abandon()

    hook(__name__, "Scheduler.on_idle", audit.step_if_idle)
    hook(__name__, "Scheduler.maybe_sleep_on_idle", sleep)
    hook(__name__, "Scheduler.process_batch_result", after_result)
    hook(__name__, "Scheduler.record_weight_version_change", after_weights)
    # NOTE: SGLang regards a server with waiting audits as idle. From here on its weights are freed or written.
    hook(__name__, "SchedulerWeightUpdaterManager.begin_weight_update", before_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.end_weight_update", after_weights)
    hook(__name__, "SchedulerWeightUpdaterManager.release_memory_occupation", before_weights)


def _resumption(audit: Audit) -> tuple[Callable[[float], str], Callable[[float], None]]:
    """Two functions for `/set_internal_state`: one refuses unknown numbers, one ends the suspension of a number."""

    def refuse(value: float) -> str:
        known = [suspended.number for suspended in audit.report().suspended]
        if value == 0 or value in known:
            return ""
        return f"no namespace that is off has this number; use {known or 'none'}, or 0 for all."

    def resume(value: float) -> None:
        audit.resume(int(value))

    return refuse, resume
