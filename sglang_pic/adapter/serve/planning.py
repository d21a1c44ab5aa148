"""Decides whether a request may reuse rows, plans its runs and locks their donors."""

from __future__ import annotations

import time
from typing import Final

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.namespace import Namespace, without_lane
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.media import TextOnly, tokens_of
from sglang_pic.adapter.serve.modes import Modes
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.resolve import TreeRows
from sglang_pic.adapter.serve.rows import HostRows, WindowRows
from sglang_pic.adapter.serve.state import Judged, LastPlan, PendingSplice, RequestState
from sglang_pic.adapter.sglang.seams import Req, Tree
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CostModel, Plan, PlanOptions, PositionSteps, Tokens

PLAN_SECONDS: Final = Metric(
    "sglang:pic_plan_seconds",
    MetricKind.HISTOGRAM,
    "Time of the scheduler to plan a request, and to find and lock its donors. A request that waits is planned more "
    "than once.",
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0),
)
METRICS: Final = (PLAN_SECONDS,)


class Planning:
    """Makes the plans of one scheduler rank.

    Args:
        index: the chunk index.
        config: the operator's settings.
        cost: measured costs, or `None` to take every run that is long enough.
        max_sequences: most virtual sequences of one batch.
        max_keys: most keys of all of them, each counted as long as the longest.
        max_extend: most tokens of the requests of a batch that have splices, spliced ones included; no limit by
            default.
        features: may divert a request, and change the options of its plan.
        faults: may have switched splicing off; none by default.
        modes: an operator may have switched splicing off.
        host: rows in host memory, on servers with HiCache.
        windows: rows of layers with sliding windows, if these have a pool of their own.
        media: images, on servers that move them.
        steps: the model's steps of positions.
        series: exports `METRICS`.
    """

    def __init__(
        self,
        index: ContentIndex,
        config: PicConfig,
        *,
        cost: CostModel | None,
        max_sequences: int,
        max_keys: int,
        max_extend: int | None = None,
        features: Features | None = None,
        faults: Faults | None = None,
        modes: Modes | None = None,
        host: HostRows | None = None,
        windows: WindowRows | None = None,
        media: TextOnly | None = None,
        steps: tuple[PositionSteps, ...] = (),
        series: Series | None = None,
    ) -> None:
        self._index, self._config, self.cost, self._features = index, config, cost, features or Features()
        self._faults, self.modes = faults or Faults(), modes or Modes()
        self._host, self._windows, self._steps = host, windows, steps
        self.media, self._series = media or TextOnly(), series or Series((), None)
        self.max_sequences, self.max_keys, self.max_extend = max_sequences, max_keys, max_extend
        # Each gap is a virtual sequence.
        self.max_gaps = max(2, min(config.max_gaps, max_sequences))
        self.next_batch_is_whole = False
        """Whether a request of `needs_whole_batch` waits for a batch without splices."""

    def refusal(self, req: Req) -> Fallback | None:
        """Why the request neither reuses nor donates, or `None`."""
        state: RequestState = req.pic
        if state.options.mode is Mode.OFF:
            return Fallback.OFF
        if self._faults.is_off or state.epoch.restarts != self._faults.num_restarts:
            return Fallback.FAULTS
        if (diversion := self.diversion(state)) is not None:
            return diversion
        if state.judged is None:
            state.judged = self._judge(req)
        return state.judged.refusal

    def _judge(self, req: Req) -> Judged:
        """Whether the request may reuse, by its own properties."""
        has_media, logprob_start = req.multimodal_inputs is not None, _logprob_start(req)
        media = self.media.read(req) if has_media else None
        in_sink = min(self._config.core.sink_tokens + 1, len(req.origin_input_ids))
        reasons = (
            (req.pic.namespace.is_too_long, Fallback.KEY),
            (req.input_embeds is not None or req.positional_embed_overrides is not None, Fallback.EMBEDDINGS),
            (has_media and media is None, Fallback.MEDIA),
            (logprob_start is not None and logprob_start < in_sink, Fallback.INPUT_LOGPROBS),
            (req.return_hidden_states, Fallback.HIDDEN_STATES),
            (req.multi_item_delimiter_indices is not None, Fallback.SCORING),
            (req.token_indices_to_pool is not None, Fallback.SCORING),
            (req.session is not None, Fallback.SESSION),
        )
        return Judged(next((reason for holds, reason in reasons if holds), None), media)

    def diversion(self, state: RequestState) -> Fallback | None:
        """Why the request is served as if it had opted out, or `None`."""
        if state.diverted is not None:
            return state.diverted
        if not self.modes.is_on:
            return Fallback.SWITCHED
        return self._features.diversion(state)

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
        policy = state.options.policy(self._config.core)
        start = req.prefix_len if prefix_len is None else prefix_len
        num_left = len(req.full_untruncated_fill_ids) - start
        # A pinned prompt is computed: spliced rows are not donors.
        is_short = num_left <= policy.min_run_tokens
        if is_short or state.is_faulty or state.options.pin is not None or self.refusal(req) is not None:
            return
        pinned_len = self._features.pinned_len(state)
        rows = TreeRows(tree, self._index.names, self._host, self._windows, media=self.media, pinned_len=pinned_len)
        tokens = tokens_of(req)
        options = PlanOptions(
            policy=policy,
            max_gaps=max(1, min(self.max_gaps, max_gaps)),
            max_runs=self._config.max_runs,
            compute_from=_logprob_start(req),
            cost=self.cost,
            num_before=num_before,
            reads_before=reads_before,
            steps=self._steps,
            whole=state.whole,
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
        state.last_plan = LastPlan(plan.dropped, plan.changed_fields, plan.guarded)
        # Before `transfer_locks`: after an exception `rows` must have all locks.
        shifts = self.media.shifts(plan.runs, tokens)
        pieces = [piece for run, shift in zip(plan.runs, shifts, strict=True) for piece in rows.pieces(run, shift)]
        locks = rows.transfer_locks([run.donor for run in plan.runs])
        if plan.runs:
            state.pending = PendingSplice(plan, pieces, locks, self._host)

    def _best_plan(self, req: Req, rows: TreeRows, tokens: Tokens, start: int, options: PlanOptions) -> Plan:
        plans = [
            self._index.plan(namespace, tokens, prefix_len=start, options=options, rows=rows)
            for namespace in donor_namespaces(req)
        ]
        # If neither splices anything, the one with reasons.
        return max(plans, key=lambda plan: (plan.num_spliced, plan.num_guarded, sum(plan.dropped.values())))


def tree_namespace(req: Req) -> Namespace:
    """The namespace of the request's rows in the tree."""
    return Namespace(req.extra_key, req.cache_salt)


def donor_namespaces(req: Req) -> list[Namespace]:
    """The namespaces of the request's donors: its own lane, and the namespace without a lane unless it is stricter."""
    state, own = req.pic, tree_namespace(req)
    if state.lane is None or state.is_stricter:
        return [own]
    base = own._replace(extra_key=without_lane(own.extra_key, state.lane) or state.namespace.extra_key)
    return [own] if base == own else [own, base]


def _logprob_start(req: Req) -> int | None:
    """The position from which the request wants logprobs, all of which are computed, or `None`.

    After a retraction it may be the prompt's end: the answer so far is prefilled, and needs its logprobs again.
    """
    return int(req.logprob_start_len) if req.return_logprob and req.logprob_start_len >= 0 else None
