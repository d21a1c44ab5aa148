"""How far two distributions or two answers are apart, and the score of an answer.

Everything is float64, so that a metric's own rounding (about 1e-15) is far below what float32 servers differ by.
Scores are SQuAD's (arXiv:1606.05250), or whether a value that retrieval asks for stands in the answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Log-probabilities over the last axis, in float64."""
    return np.asarray(special.log_softmax(logits.astype(np.float64), axis=-1))


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


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score_answer(answer: str, golds: Sequence[str], *, contains: bool) -> float:
    """The best score over the gold answers, in [0, 1]; an answer's first line that has text counts, small models go on.

    Args:
        contains: 1 where a gold answer stands in it word for word, else 0: what retrieval of a value asks.
            Otherwise the F1 of shared words.
    """
    line = next((line for line in answer.splitlines() if line.strip()), "")
    said = normalise(line)
    wanted = [normalise(gold) for gold in golds]
    if contains:
        return float(any(f" {gold} " in f" {said} " for gold in wanted))
    return max((word_f1(said, gold) for gold in wanted), default=0.0)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def word_f1(answer: str, gold: str) -> float:
    """F1 of the words of two normalised texts, with their counts; two empty texts are equal."""
    said, wanted = Counter(answer.split()), Counter(gold.split())
    total = said.total() + wanted.total()
    return 2 * (said & wanted).total() / total if total else 1.0
