"""The audit's own hooks: first tokens' logits, and the operator's switch.

A server with `audit_rate` 0 installs none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_pic.adapter import server_info
from sglang_pic.adapter.audit.audit import Audit
from sglang_pic.adapter.audit.report import RESUME_KEY
from sglang_pic.adapter.seams import Req, RunnerOutput, ScheduleBatch


class FirstTokens:
    """The observer of forward passes that hands the drawn requests' logits to `audit`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def watch(self, batch: ScheduleBatch) -> Callable[[RunnerOutput], None] | None:
        """Note the drawn requests of a batch by their places in it: logits come in that order."""
        drawn: list[tuple[int, Req]] = []
        for place, req in enumerate(batch.reqs):
            # A chunk that ends earlier is not the pass that was drawn.
            if req.pic.is_drawn and not req.output_ids:
                req.pic.is_drawn = False
                drawn.append((place, req))

        def keep(output: RunnerOutput) -> None:
            # NOTE: sampling changes the logits in place, later on this stream. Scoring of several items leaves none.
            logits = output.logits_output.next_token_logits
            for place, req in drawn:
                self._audit.keep(req, None if logits is None else logits[place])

        return keep if drawn else None


def install(audit: Audit) -> None:
    """Let `/set_internal_state` end a suspension by its number; SGLang applies the hook later."""

    def refuse(value: float) -> str:
        known = [suspended.number for suspended in audit.report().suspended]
        if value == 0 or value in known:
            return ""
        return f"no namespace that is off has this number; use {known or 'none'}, or 0 for all."

    def resume(value: float) -> None:
        audit.resume(int(value))

    server_info.take(RESUME_KEY, refuse, resume)
