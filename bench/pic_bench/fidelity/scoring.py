"""Scores an answer against the gold answers.

Owns the normalisation of SQuAD (arXiv:1606.05250) and its exact match and F1, and the check for a value that retrieval
asks for. It must not know models or prompts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Score", "normalise", "score_answer", "word_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Score(NamedTuple):
    """The best over the gold answers."""

    value: float
    """In [0, 1]."""
    exact: bool
    """Whether the answer is a gold answer, both normalised."""


def score_answer(answer: str, golds: Sequence[str], *, contains: bool) -> Score:
    """The score of an answer; an answer's first line that has text counts, small models go on.

    Args:
        contains: 1 where a gold answer stands in it word for word, else 0: what retrieval of a value asks.
            Otherwise the F1 of shared words.
    """
    line = next((line for line in answer.splitlines() if line.strip()), "")
    said = normalise(line)
    wanted = [normalise(gold) for gold in golds]
    exact = said in wanted
    if contains:
        return Score(float(any(f" {gold} " in f" {said} " for gold in wanted)), exact)
    return Score(max((word_f1(said, gold) for gold in wanted), default=0.0), exact)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def word_f1(answer: str, gold: str) -> float:
    """F1 of the words of two normalised texts, with their counts; two empty texts are equal."""
    said, wanted = answer.split(), gold.split()
    shared = sum((Counter(said) & Counter(wanted)).values())
    if not said or not wanted:
        return float(said == wanted)
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
