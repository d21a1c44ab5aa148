"""Plans the runs of a request and locks their donors."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from sglang_pic.adapter.metrics import Metric, MetricKind
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.modes import logprob_start
from sglang_pic.adapter.serve.rows import ON_DEVICE, RowTier, TreeRows
from sglang_pic.adapter.serve.state import LastPlan, PendingSplice, RequestState, tokens_of, tree_namespace
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.sglang.seams import Req, Tree
from sglang_pic.core import CostModel, Plan, PlanOptions, PositionSteps, Tokens

PLAN_SECONDS: Final = Metric(
    "sglang:pic_plan_seconds",
    MetricKind.HISTOGRAM,
    "Time of the scheduler to plan a request, and to find and lock its donors. A request that waits is planned more "
    "than once.",
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0),
)
METRICS: Final = (PLAN_SECONDS,)


class Limits(NamedTuple):
    """What the model and its attention backend can splice."""

    max_sequences: int
    """Most virtual sequences of one batch."""
    max_keys: int
    """Most keys of all of them, each counted as long as the longest."""
    max_extend: int | None = None
    """Most tokens of the requests of a batch that have splices, spliced ones included; None for no limit."""
    steps: tuple[PositionSteps, ...] = ()
    """Position boundaries that a shift must not cross."""


class Planning:
    """Makes the plans of one scheduler rank.

    Args:
        stations: the operator's settings, the chunk index, and which requests may reuse its donors.
        limits: of the model and its attention backend.
        cost: measured costs, or `None` to take every run that is long enough.
        tier: where rows are.
    """

    def __init__(
        self,
        stations: Stations,
        limits: Limits,
        cost: CostModel | None = None,
        tier: RowTier = ON_DEVICE,
    ) -> None:
        self._config, self._index, self._media = stations.config, stations.index, stations.media
        self._eligibility = stations.eligibility
        self.limits, self.cost, self._tier = limits, cost, tier
        self._series = stations.series(METRICS)
        # Each gap is a virtual sequence.
        self.max_gaps = max(2, min(self._config.max_gaps, limits.max_sequences))

    def plan(
        self,
        req: Req,
        tree: Tree,
        *,
        max_gaps: int,
        prefix_len: int | None = None,
        num_before: int = 0,
        reads_before: int = 0,
    ) -> None:
        """Plan the rest of the request, and lock its donors; the plan is put into `req.pic.pending`.

        Args:
            req: the request; its earlier plan is replaced.
            tree: the radix tree.
            max_gaps: virtual sequences that the batch can take.
            prefix_len: tokens before the plan, if more than `req.prefix_len`.
            num_before: tokens that the batch computes already.
            reads_before: their `num_reads`.

        Raises:
            Exception: as the index and the tree do; no donor is locked then.
        """
        state: RequestState = req.pic
        state.drop_plan()
        # `guarded` of an earlier chunk's plan stays: a rest too short to be planned may be computed because of it.
        state.last_plan.dropped, state.last_plan.lost = {}, None
        policy = state.policy or self._config.core
        start = req.prefix_len if prefix_len is None else prefix_len
        num_left = len(req.full_untruncated_fill_ids) - start
        # A pinned prompt is computed: spliced rows are not donors.
        is_short = num_left <= policy.min_run_tokens
        if is_short or state.is_faulty or state.options.pin is not None or self._eligibility.refusal(req) is not None:
            return
        steps, whole, pinned_len = self.limits.steps, state.whole, state.pinned_len
        rows = TreeRows(
            tree, self._index.names, self._tier, media=self._media, pinned_len=pinned_len, steps=steps, whole=whole
        )
        tokens = tokens_of(req)
        options = PlanOptions(
            policy=policy,
            max_gaps=max(1, min(self.max_gaps, max_gaps)),
            max_runs=self._config.max_runs,
            compute_from=logprob_start(req),
            cost=self.cost,
            num_before=num_before,
            reads_before=reads_before,
        )
        began = time.perf_counter()
        try:
            self._plan(req, rows, tokens, start, options)
        except Exception:
            rows.release()
            raise
        self._series.observe(PLAN_SECONDS, time.perf_counter() - began)

    def _plan(self, req: Req, rows: TreeRows, tokens: Tokens, start: int, options: PlanOptions) -> None:
        state: RequestState = req.pic
        plan = self._best_plan(req, rows, tokens, start, options)
        state.last_plan = LastPlan(plan.dropped, plan.guarded)
        # Before `transfer_locks`: after an exception `rows` must have all locks.
        shifts = self._media.shifts(plan.runs, state.media)
        pieces = [piece for run, shift in zip(plan.runs, shifts, strict=True) for piece in rows.pieces(run, shift)]
        locks = rows.transfer_locks([run.donor for run in plan.runs])
        if plan.runs:
            state.pending = PendingSplice(plan, pieces, locks, self._tier)

    def _best_plan(self, req: Req, rows: TreeRows, tokens: Tokens, start: int, options: PlanOptions) -> Plan:
        plans = [
            self._index.plan(namespace, tokens, prefix_len=start, options=options, rows=rows)
            for namespace in donor_namespaces(req)
        ]
        # If neither splices anything, the one with reasons.
        return max(plans, key=lambda plan: (plan.num_spliced, plan.num_guarded, sum(plan.dropped.values())))


def donor_namespaces(req: Req) -> list[Namespace]:
    """The namespaces of the request's donors: that of its own rows, and that without its lane if it may use that."""
    state: RequestState = req.pic
    own, base = tree_namespace(req), state.base
    return [own] if base is None else [own, base]
