"""The rules for an answer that every claim keeps: how much there must be, and when a difference counts as none.

It must not know records or words of an experiment.
"""

from __future__ import annotations

from pic_bench.fidelity.summary import Limits
from pic_bench.report.stats import Estimate

__all__ = ["not_below", "too_few", "within"]


def too_few(number: int, num_units: int, words: tuple[str, str], limits: Limits) -> str | None:
    """What there is too little of for a claim; None where there is enough.

    Args:
        words: what is counted, and what the intervals draw.
    """
    for count, word in ((number, words[0]), (num_units, words[1])):
        if count < limits.min_prompts:
            return f"{count} {word}, fewer than {limits.min_prompts}"
    return None


def within(change: Estimate, num_units: int, limits: Limits) -> bool:
    """Whether a difference counts as none: its interval lies within the margin on both sides."""
    return not_below(change, num_units, limits) and change.high <= limits.margin


def not_below(change: Estimate, num_units: int, limits: Limits) -> bool:
    """Whether a loss beyond the margin is ruled out, by the interval and by how much was drawn.

    An interval of equal values has no width however few they are; up to 3 / n of what is drawn may still be otherwise
    (rule of three: Hanley and Lippman-Hand, JAMA 249:1743, 1983).
    """
    return change.low > 0 or (change.low >= -limits.margin and limits.margin * num_units >= 3)
