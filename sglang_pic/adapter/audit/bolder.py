"""What the next bolder preset would have done with an audited request, measured beside the full computation.

It is planned when the request is admitted, among the donors that the request had itself: later its own rows would be
the best ones. It is executed once the full computation is done, whose rows stand for the prefix, so that the figure is
of that preset's splices alone. Nothing is served from it, and nothing changes by itself.

    slots of the full computation    [0, prefix_len)
    slots of its own                 [prefix_len, end), runs copied at once, gaps computed a step at a time
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_pic.adapter.audit.report import BolderReport
from sglang_pic.adapter.probe.prompt_pass import PromptPass, take_slots
from sglang_pic.adapter.seams import ModelRunner, Req, Tree
from sglang_pic.adapter.serve.planning import Planning
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.core import Plan, ReusePolicy, bolder_than
from sglang_pic.runtime.splice import Splicer


class Bolder:
    """Plans and prepares the passes of one scheduler rank.

    Args:
        tree: where donors are.
        planning: plans for requests.
        splicer: moves rows.
        policy: the server's.
    """

    def __init__(self, tree: Tree, planning: Planning, splicer: Splicer, policy: ReusePolicy) -> None:
        self._tree, self._planning, self._splicer, self._policy = tree, planning, splicer, policy
        self.reports: dict[str, BolderReport] = {}
        """By preset, what it would have done with requests of the one before it."""

    def plan(self, req: Req) -> tuple[str, Plan] | None:
        """The next bolder preset than the request's, and the plan under it if that splices more than was spliced.

        Raises:
            Exception: no donor is locked then.
        """
        state: RequestState = req.pic
        bolder = bolder_than(state.options.policy(self._policy))
        # Rows of a prompt's earlier chunks are in the tree already, and would be donors of the whole.
        if bolder is None or state.matched_len is None or state.admitted_from != state.matched_len:
            return None
        plan = self._planning.plan_as(req, self._tree, bolder, state.matched_len)
        return (bolder.preset, plan) if plan.num_spliced > state.num_chunk_hit else None

    def begin(
        self, runner: ModelRunner, tokens: np.ndarray, plan: Plan, full_slots: torch.Tensor, *, lora_id: str | None
    ) -> PromptPass | None:
        """Copy the runs on the current stream, which is the one that passes run on.

        Returns:
            The pass; `None` where donors left the device meanwhile, or the pool has no room.

        Raises:
            Exception: no donor is locked then, and no slot taken.
        """
        resolver, host = self._planning.resolver(self._tree, on_host=False), self._planning.host
        spans = [(run.donor, run.donor_start, run.donor_end) for run in plan.runs]
        try:
            if any(resolver(path, end) < end or resolver.missing(path, start, end) for path, start, end in spans):
                return None
            sources = [resolver.rows(*span) for span in spans]
            if host is not None:
                stream = torch.get_device_module(runner.device).current_stream()
                host.wait_for_loads(stream, [each.on_device for each in sources])
            # What the full computation holds counts as evictable, and must stay.
            own = take_slots(self._tree, plan.end - plan.prefix_len, kept=len(full_slots))
            if own is None:
                return None
            table = torch.cat([full_slots[: plan.prefix_len], own]).to(torch.int64)
            targets = [table[run.target_start : run.target_end] for run in plan.runs]
            shifts = [torch.full_like(each, run.shift) for run, each in zip(plan.runs, targets, strict=True)]
            try:
                windows = [each.window_slots for each in sources if each.window_slots is not None]
                self._splicer.splice(
                    torch.cat([each.slots for each in sources]),
                    torch.cat(targets),
                    torch.cat(shifts),
                    torch.cat(windows) if windows else None,
                )
            except Exception:
                self._tree.token_to_kv_pool_allocator.free(own)
                raise
            return PromptPass(runner, tokens, own, table=table, gaps=plan.gaps, lora_id=lora_id)
        finally:
            # The copy is queued: whoever reuses a donor's slot writes it from a later pass on the same stream.
            resolver.release()

    def count(
        self, preset: str, kl: float, served_kl: float, *, agreed: bool, num_computed: int, num_saved: int
    ) -> BolderReport:
        """Add a measured request to its report; divergences in nats, tokens as the report has them."""
        report = self.reports.setdefault(preset, BolderReport(preset=preset))
        report.num_measured += 1
        report.num_agreed += agreed
        report.mean_kl += (kl - report.mean_kl) / report.num_measured
        report.served_mean_kl += (served_kl - report.served_mean_kl) / report.num_measured
        report.num_computed += num_computed
        report.num_saved += num_saved
        return report
