"""The arithmetic of the reports: medians, ratios, KL of two top-k lists, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile

import msgspec
import numpy as np
from scipy.stats import beta

# Percentiles of 2,000 resamples move by a few percent of the interval's width from seed to seed: less than is shown.
RESAMPLES = 2000
MOST_KL = 0.005
"""The bar of the paired experiment, nats a token."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mean of `n` values with the bounds of its 95 % interval, of `bootstrap` unless a user says otherwise."""

    value: float
    low: float
    high: float
    n: int


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(values)) if values else None


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`, or None where the denominator is zero."""
    return numerator / denominator if denominator else None


def common_len(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items (characters, tokens) are equal before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def merge_tokens(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """A top-k list by token text; tokens of the same text (parts of one character) add their probabilities."""
    merged: dict[str, float] = {}
    for token, logprob in pairs:
        merged[token] = float(np.logaddexp(merged[token], logprob)) if token in merged else logprob
    return merged


def top_k_kl(p: Mapping[str, float], q: Mapping[str, float]) -> float | None:
    """KL(p || q) in nats of two top-k lists of log probabilities, over the tokens of `p` and one bin for the rest.

    A token of `p` that `q` does not list gets the smallest probability in `q`'s list, its upper bound: the result
    is then too small as a rule; not always, for the rest loses what the token gains. None where a list is empty.
    """
    if not p or not q:
        return None
    floor, tiny = min(q.values()), 1e-9
    ps = _with_rest([math.exp(value) for value in p.values()])
    qs = _with_rest([math.exp(q.get(token, floor)) for token in p])
    return max(0.0, sum(a * math.log(a / max(b, tiny)) for a, b in zip(ps, qs, strict=True) if a > tiny))


def _with_rest(shares: list[float]) -> list[float]:
    """Shares of some tokens and, as one more, of all others; they add up to 1."""
    shares = [*shares, max(0.0, 1.0 - sum(shares))]
    whole = sum(shares)
    return [share / whole for share in shares]


def bootstrap(values: Sequence[float], units: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of `values`, which must not be empty, over resamples of them; differences of pairs are values too.

    Args:
        units: what each value belongs to, where values of one unit resemble each other: units are drawn then, with all
            their values, as in the cluster bootstrap (Davison and Hinkley, "Bootstrap Methods and their Application",
            1997, section 3.8).
    """
    data = np.asarray(values, dtype=float)
    if units is None:
        weights = _counts(len(data))
    else:
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        weights = _counts(len(numbers))[:, [numbers[unit] for unit in units]]
    return _estimate(float(data.mean()), weights @ data / weights.sum(axis=1), len(data))


@lru_cache(maxsize=4)
def _counts(size: int) -> np.ndarray:
    """How often every value is in every resample, `[RESAMPLES, size]`: one product then sums all resamples."""
    draws = np.random.default_rng(0).integers(0, size, size=(RESAMPLES, size), dtype=np.int32)
    counted = np.bincount((draws + np.arange(RESAMPLES)[:, None] * size).ravel(), minlength=RESAMPLES * size)
    return counted.reshape(RESAMPLES, size).astype(float)


def _estimate(value: float, resampled: np.ndarray, size: int) -> Estimate:
    low, high = (float(x) for x in np.percentile(resampled, [2.5, 97.5]))
    return Estimate(value=value, low=low, high=high, n=size)


def most_lost(lost: int, num: int) -> float:
    """The exact upper bound of a share (Clopper and Pearson, Biometrika 26 (1934), 404-413): 0 of 177 are up to 1.7 %.

    NOTE: what is won must not be set against it: intervals of a difference are too narrow where nothing was lost.
    """
    return 1.0 if lost == num else float(beta.ppf(0.95, lost + 1, num - lost))
