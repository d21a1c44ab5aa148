"""Counts prompt tokens by tenant, hashed, where the operator wants that."""

from __future__ import annotations

from typing import Final

from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.metrics import MAX_VALUES, Metric, MetricKind, Series
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.adapter.sglang.seams import BuildContext, Req

PROMPT_TOKENS: Final = Metric(
    "sglang:pic_tenant_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens of admitted requests that may reuse, by tenant: the first 8 hex digits of the SHA-256 of the "
    f"cache_salt, else of the extra_key, or `none`. The first {MAX_VALUES} tenants are counted, all others as `other`. "
    "With tenant_metrics only.",
    label="tenant",
)
SPLICED_TOKENS: Final = Metric(
    "sglang:pic_tenant_spliced_tokens_total",
    MetricKind.COUNTER,
    "Of these tokens, those that were spliced.",
    label="tenant",
)
METRICS: Final = (PROMPT_TOKENS, SPLICED_TOKENS)


class Tenants(Feature):
    """The counts of one scheduler rank; `series` exports `METRICS`."""

    fault = Fallback.FAULT_ACCOUNTING

    def __init__(self, series: Series) -> None:
        self._series = series

    @classmethod
    def make(cls, _: BuildContext, parts: Parts) -> Tenants | None:
        """The counts, with `tenant_metrics`."""
        return cls(parts.stations.series(METRICS)) if parts.stations.config.tenant_metrics else None

    def on_admitted(self, req: Req) -> None:
        state: RequestState = req.pic
        (start, end), (_, counted) = state.counts.span, state.last_chunk
        self._series.add(PROMPT_TOKENS, end - start, value=state.namespace.tenant)
        self._series.add(SPLICED_TOKENS, counted.spliced, value=state.namespace.tenant)
