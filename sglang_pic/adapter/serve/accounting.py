"""Counters of the cache for `/metrics`, and the closed set of reasons why a request was not served by splicing.

Exports counts, never ratios. `prompt = prefix + chunk + computed` holds for every admitted request; tokens that a
retracted request computes again are not counted. It must not import `prometheus_client` before SGLang has chosen its
multiprocess directory: the counters are made when the cache is.
"""

from __future__ import annotations

from typing import Final

from sglang_pic.core import DropReason, Reason

__all__ = ["REASONS", "Fallback", "Metrics"]


class Fallback(Reason):
    """Why a request was computed although the cache was on, beside the planner's own reasons (`DropReason`)."""

    ADAPTER = "adapter", "The request uses a LoRA adapter, which shapes the KV."
    AUDIT = "audit", "Audits have switched splicing off in the request's namespace."
    BATCH = "batch", "Another request of the batch brings embeddings or wants hidden states by place."
    EMBEDDINGS = "embeddings", "The request brings embeddings or media, so its tokens do not determine its KV."
    HIDDEN_STATES = "hidden_states", "The request wants hidden states of its prompt."
    INPUT_LOGPROBS = "input_logprobs", "The request wants logprobs of its prompt."
    MEMORY = "memory", "The pool was too full to hold the donors while the request was admitted."
    OFF = "off", "The request opted out."
    SCORING = "scoring", "The request is scored at places in the middle of its prompt, which must be computed."
    SESSION = "session", "A streaming session owns the request's row."


REASONS: Final[tuple[Reason, ...]] = (*DropReason, *Fallback)
"""Every label of `sglang:pic_fallbacks_total`."""


class Metrics:
    """The counters of one scheduler rank; without labels it counts nothing.

    Args:
        labels: rank labels of every series, or `None` where the server exports no metrics or another rank does.
    """

    def __init__(self, labels: dict[str, str] | None) -> None:
        self._labels = labels
        if labels is None:
            return
        from prometheus_client import Counter

        names = list(labels)
        self._tokens = Counter(
            "sglang:pic_tokens_total",
            "Prompt tokens of admitted requests by source: prefix (exact prefix hit), chunk (spliced), computed. "
            "Tokens that a retracted request computes again are not counted.",
            [*names, "source"],
        )
        self._prompt = Counter("sglang:pic_prompt_tokens_total", "Prompt tokens of admitted requests.", names)
        self._runs = Counter("sglang:pic_runs_total", "Runs that were spliced.", names)
        self._requests = Counter(
            "sglang:pic_spliced_requests_total", "Prefill chunks of requests that had at least one run.", names
        )
        self._fallbacks = Counter(
            "sglang:pic_fallbacks_total",
            "Requests, or candidate runs of requests, that were computed although the cache was on, by reason.",
            [*names, "reason"],
        )
        for source in ("prefix", "chunk", "computed"):
            self._tokens.labels(**labels, source=source)
        for reason in REASONS:
            self._fallbacks.labels(**labels, reason=reason.value)
        for counter in (self._prompt, self._runs, self._requests):
            counter.labels(**labels)

    def count_tokens(self, *, prefix: int, chunk: int, computed: int, runs: int) -> None:
        """Count one admitted prefill chunk."""
        if self._labels is None:
            return
        self._prompt.labels(**self._labels).inc(prefix + chunk + computed)
        for source, count in (("prefix", prefix), ("chunk", chunk), ("computed", computed)):
            self._tokens.labels(**self._labels, source=source).inc(count)
        if runs:
            self._runs.labels(**self._labels).inc(runs)
            self._requests.labels(**self._labels).inc()

    def count_fallback(self, reason: Reason, count: int = 1) -> None:
        """Count a request, or a candidate run, that was computed."""
        if self._labels is not None and count:
            self._fallbacks.labels(**self._labels, reason=reason.value).inc(count)
