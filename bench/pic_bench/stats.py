"""Owns the arithmetic of a comparison: medians, ratios, KL of two top-k lists, a paired bootstrap.

It must not know requests, arms or files: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

__all__ = ["Interval", "bootstrap_median", "median", "merge_tokens", "ratio", "top_k_kl"]


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A median with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(values)) if values else None


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`, or None where the denominator is zero."""
    return numerator / denominator if denominator else None


def merge_tokens(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """A top-k list by token text; tokens of the same text (parts of one character) add their probabilities."""
    merged: dict[str, float] = {}
    for token, logprob in pairs:
        merged[token] = float(np.logaddexp(merged[token], logprob)) if token in merged else logprob
    return merged


def top_k_kl(p: Mapping[str, float], q: Mapping[str, float]) -> float | None:
    """KL(p || q) in nats of two top-k lists of log probabilities, over the tokens of `p` and one bin for the rest.

    A token of `p` that `q` does not list gets the smallest probability in `q`'s list, its upper bound: the result
    is then a lower bound. None where a list is empty.
    """
    if not p or not q:
        return None
    floor = min(q.values())
    ps = [math.exp(v) for v in p.values()]
    qs = [math.exp(q.get(token, floor)) for token in p]
    ps.append(max(0.0, 1.0 - sum(ps)))
    qs.append(max(0.0, 1.0 - sum(qs)))
    p_sum, q_sum = sum(ps), sum(qs)
    tiny = 1e-9
    total = 0.0
    for a, b in zip(ps, qs, strict=True):
        a_share, b_share = a / p_sum, max(b / q_sum, tiny)
        if a_share > tiny:
            total += a_share * math.log(a_share / b_share)
    return max(0.0, total)


def bootstrap_median(values: Sequence[float], *, seed: int, resamples: int = 10_000) -> Interval:
    """The median of `values` with a 95 % percentile-bootstrap interval; `values` must not be empty."""
    data = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(data), size=(resamples, len(data)))
    medians = np.median(data[draws], axis=1)
    low, high = (float(x) for x in np.percentile(medians, [2.5, 97.5]))
    return Interval(median=float(np.median(data)), low=low, high=high)
