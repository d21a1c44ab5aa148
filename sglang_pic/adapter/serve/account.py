"""Counts the tokens of every admitted request, and exports the counts as metrics.

For every admitted request `prompt = prefix + chunk + computed`. Tokens that a retracted request computes again are not
counted again.
"""

from __future__ import annotations

from typing import Final

from sglang_pic.adapter.metrics import Metric, MetricKind, Series
from sglang_pic.adapter.serve.fallback import REASONS, Fallback
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.serve.traffic_log import TrafficLog
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import Context, CostModel, Plan, Reason, Span, intersect_spans

TOKENS: Final = Metric(
    "sglang:pic_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens of admitted requests by source, without those that a retracted request computes again.",
    label="source",
    values={"prefix": "Exact prefix hit.", "chunk": "Spliced.", "computed": "Computed."},
)
PROMPT_TOKENS: Final = Metric(
    "sglang:pic_prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens of admitted requests."
)
RUNS: Final = Metric("sglang:pic_runs_total", MetricKind.COUNTER, "Runs that were spliced.")
SPLICED: Final = Metric(
    "sglang:pic_spliced_requests_total", MetricKind.COUNTER, "Prefill chunks of requests that had at least one run."
)
SPLICED_TOKENS: Final = Metric(
    "sglang:pic_spliced_tokens_total",
    MetricKind.COUNTER,
    "Spliced tokens, by how the text before the donor differs from the text before the run. They add up to the source "
    "chunk of sglang:pic_tokens_total.",
    label="context",
    values={
        Context.SAME.value: "The text is the same.",
        Context.MOVED.value: "Text was moved, removed or added; no field has another value.",
        Context.CHANGED.value: "A field has another value.",
        Context.OTHER.value: "Most of it is another text.",
    },
)
FETCHED_TOKENS: Final = Metric(
    "sglang:pic_fetched_tokens_total",
    MetricKind.COUNTER,
    "Of the spliced tokens, those whose rows were read from host memory (HiCache).",
)
INHERITED_TOKENS: Final = Metric(
    "sglang:pic_inherited_tokens_total",
    MetricKind.COUNTER,
    "Tokens of exact prefix hits from the first approximate row on: spliced for an earlier request, or computed after "
    "such rows.",
)
UNKNOWN_TOKENS: Final = Metric(
    "sglang:pic_unknown_tokens_total",
    MetricKind.COUNTER,
    "Tokens of exact prefix hits of which it is not known whether they are approximate: rows of requests that donate "
    "nothing, and rows that the index has evicted. They do not count as inherited.",
)
GUARDED: Final = Metric(
    "sglang:pic_guarded_tokens_total",
    MetricKind.COUNTER,
    "Tokens computed instead of spliced, because a field before them has another value than before the donor.",
)
SAVED: Final = Metric(
    "sglang:pic_saved_seconds_total",
    MetricKind.COUNTER,
    "Estimated prefill time that splices saved, as if each prefill chunk had a pass of its own. 0 if cost_gate is off.",
)
UNDONE: Final = Metric(
    "sglang:pic_undone_tokens_total",
    MetricKind.COUNTER,
    "Tokens counted as spliced that were computed because of a fault after admission.",
)
FALLBACKS: Final = Metric(
    "sglang:pic_fallbacks_total",
    MetricKind.COUNTER,
    "Requests, or candidate runs of requests, that were computed instead of spliced, by reason.",
    label="reason",
    values={reason.value: reason.description for reason in REASONS},
)
METRICS: Final = (
    TOKENS,
    PROMPT_TOKENS,
    RUNS,
    SPLICED,
    SPLICED_TOKENS,
    FETCHED_TOKENS,
    INHERITED_TOKENS,
    UNKNOWN_TOKENS,
    SAVED,
    UNDONE,
    GUARDED,
    FALLBACKS,
)


class Accounting:
    """The counts of one scheduler rank; `series` exports `METRICS`, `log` is given on the rank that logs."""

    def __init__(self, series: Series, log: TrafficLog | None = None) -> None:
        self._series, self._log = series, log

    def count_admitted(
        self,
        req: Req,
        plan: Plan | None,
        refusal: Fallback | None,
        *,
        first_chunk: bool,
        cost: CostModel | None = None,
    ) -> None:
        """Count an admitted prefill chunk, `[req.prefix_len, req.extend_end)`.

        A request that was retracted begins again; then only those tokens of its prompt are counted that were not
        counted before.

        Args:
            req: the request; spliced tokens are added to its `cached_tokens`, which the client sees.
            plan: the plan of the chunk, if any.
            refusal: why the request reuses nothing, on its first chunk.
            first_chunk: whether the chunk begins at the exact prefix hit.
            cost: estimates the time that splices save.
        """
        state: RequestState = req.pic
        # A waiting request is planned at every attempt to admit it; only its last plan counts.
        reasons = dict[Reason, int](state.last_plan.dropped.items())
        if state.last_plan.lost is not None:
            reasons[state.last_plan.lost] = 1
        if refusal is not None and not req.retracted_stain:
            reasons[refusal] = 1
        for reason, count in reasons.items():
            self.count_fallback(reason, count)
        state.counts.reasons.update(reasons)
        state.counts.span = start, end = _uncounted(req, first_chunk=first_chunk)
        if start == end:
            return
        plan = None if plan is None else plan.since(start)
        num_spliced, _, num_fetched = state.count(plan)
        req.cached_tokens += num_spliced
        prefix = max(0, min(req.prefix_len, end) - start)
        computed = end - start - prefix - num_spliced
        self._series.add(PROMPT_TOKENS, end - start)
        for source, num_tokens in (("prefix", prefix), ("chunk", num_spliced), ("computed", computed)):
            self._series.add(TOKENS, num_tokens, value=source)
        saved_us = 0.0
        if plan is not None and plan.runs:
            if cost is not None:
                # Below 0 only if other requests shared the pass.
                saved_us = max(0.0, plan.saved_us(cost, num_fetched=num_fetched))
            self._series.add(SAVED, saved_us / 1e6)
            self._series.add(RUNS, len(plan.runs))
            self._series.add(SPLICED)
            self._series.add(FETCHED_TOKENS, num_fetched)
            for run in plan.runs:
                self._series.add(SPLICED_TOKENS, run.num_tokens, value=run.context.value)
        if self._log is not None:
            self._log.note(is_new=not start, prefix=prefix, spliced=num_spliced, computed=computed, saved_us=saved_us)
        self._count_context(req)

    def undo(self, req: Req) -> None:
        """Undo the counted splices of the last admitted chunk, because it is computed after all."""
        num_spliced = req.pic.undo_admission()
        req.cached_tokens -= num_spliced
        self._series.add(UNDONE, num_spliced)

    def _count_context(self, req: Req) -> None:
        """Count tokens computed because of changed fields, and those of the prefix hit that may not be exact."""
        state: RequestState = req.pic
        counted_from, counted_to = state.counts.span
        guarded = intersect_spans(state.last_plan.guarded, max(counted_from, req.prefix_len), counted_to)
        num_guarded = sum(end - start for start, end in guarded)
        state.counts.guarded += num_guarded
        self._series.add(GUARDED, num_guarded)
        if not counted_from:
            state.counts.inherited = state.prefix.approximate_len
            self._series.add(INHERITED_TOKENS, state.counts.inherited)
            self._series.add(UNKNOWN_TOKENS, state.prefix.unknown_len)

    def count_fallback(self, reason: Reason, count: int = 1) -> None:
        """Count requests, runs or faults by reason."""
        self._series.add(FALLBACKS, count, value=reason.value)


def _uncounted(req: Req, *, first_chunk: bool) -> Span:
    """The prompt tokens of an admitted chunk, and of the exact prefix before the first, that were not counted yet."""
    start: int = req.pic.counts.span[1]
    if not first_chunk:
        start = max(start, req.prefix_len)
    # After a retraction the answer so far is prefilled, too.
    return start, max(start, min(req.extend_end, len(req.origin_input_ids)))
