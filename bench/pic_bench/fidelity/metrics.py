"""Owns the arithmetic of one measured request: how far two distributions, two answers or two sets of keys are apart.

Numbers in, numbers out, float64 throughout, so that the metric's own rounding (about 1e-15) is far below what float32
servers differ by. It must not know requests, arms or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["agreed_len", "centred_cosine", "divergence", "log_softmax", "mean_nll", "relative_error"]

Floats = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Log-probabilities over the last axis. O(n), one copy in float64."""
    out = logits.astype(np.float64)
    out -= out.max(axis=-1, keepdims=True)
    out -= np.log(np.exp(out).sum(axis=-1, keepdims=True))
    return out


def divergence(p: Floats, q: Floats, probabilities: Floats | None = None) -> Floats:
    """KL(p || q) in nats over the last axis of two arrays of log-probabilities; never below 0.

    Args:
        p: `[..., vocab]`, the reference.
        q: the same shape.
        probabilities: `exp(p)`, where the caller has it: one reference serves many comparisons.
    """
    weights = np.exp(p) if probabilities is None else probabilities
    return np.maximum(0.0, np.einsum("...v,...v->...", weights, p - q))


def centred_cosine(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    """Cosine of two vectors of logits, each less its mean: a constant added to all logits says nothing."""
    x, y = (v.astype(np.float64) - v.mean(dtype=np.float64) for v in (a, b))
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm else 1.0


def mean_nll(logprobs: Floats, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of `tokens`, the first of which is predicted by the first row."""
    return float(-logprobs[np.arange(len(tokens)), np.asarray(tokens)].mean())


def agreed_len(reference: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    pairs = zip(reference, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(other)))


def relative_error(reference: npt.NDArray[np.floating], other: npt.NDArray[np.floating]) -> float:
    """L2 norm of the difference over the reference's; both in one shape."""
    difference = np.linalg.norm((other - reference).astype(np.float64))
    return float(difference / np.linalg.norm(reference.astype(np.float64)))
