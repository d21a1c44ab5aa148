"""Bounds of the mean of values in [0, 1] that hold at every moment at once, so that a run may stop whenever it likes.

Whoever bets against a true mean, and never borrows, owns `1 / alpha` times the stake at some moment with a chance of at
most `alpha` ("Estimating means of bounded random variables by betting", arXiv:2010.09686, section 4: predictable
plug-in bets, one side each). The values may have any distribution in [0, 1], however heavy its tail; each has the mean
given those before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
ALPHA = 0.05  # chance that a bound is ever wrong
MAX_SESSIONS = 1000  # where more values are needed, `num_needed` gives up
# Any share below 1 is valid. On records of OpenDevin's trace (SmolLM2, budget .01, cap .05) .85 needs 20 sessions where
# the mean is .0016, and 67 where it is .0053; .5 needs 32 and 74, .95 needs 18 and 95.
_STAKE = 0.85
_STEPS = 30
_REPEATS = 400
_SURE = 0.8


class Bounds(NamedTuple):
    """A lower and an upper bound of a mean; each alone is wrong with a chance of at most `alpha`."""

    low: float
    high: float


def log_capital(values: npt.ArrayLike, mean: float, alpha: float = ALPHA) -> Floats:
    """The log of what a bettor against "the mean is `mean` or more" owns after each value, beginning with 0.

    Args:
        values: `[..., n]` in [0, 1], in the order in which they came.
        mean: in (0, 1).
        alpha: for which the bets are laid out; they are valid for any.

    Returns:
        `[..., n]`. If the claim holds, `log(1 / alpha)` is ever reached with a chance of at most `alpha`.
    """
    found = np.asarray(values, dtype=np.float64)
    number = np.arange(1, found.shape[-1] + 1)
    means = (0.5 + found.cumsum(axis=-1)) / (number + 1)
    variances = (0.25 + ((found - means) ** 2).cumsum(axis=-1)) / (number + 1)
    # NOTE: a bet may only know the values before it.
    before = np.concatenate([np.full((*found.shape[:-1], 1), 0.25), variances[..., :-1]], axis=-1)
    bets = np.sqrt(2 * np.log(1 / alpha) / (before * number * np.log(number + 1)))
    return np.log1p(np.minimum(bets, _STAKE / (1 - mean)) * (mean - found)).cumsum(axis=-1)


def is_below(values: npt.ArrayLike, mean: float, alpha: float = ALPHA) -> bool:
    """Whether at some moment the values have shown that their mean is below `mean`."""
    return bool((log_capital(values, mean, alpha) >= np.log(1 / alpha)).any())


def bounds(values: npt.ArrayLike, alpha: float = ALPHA) -> Bounds:
    """The tightest bounds of the mean that held at any moment; 0 and 1 of no values. O(n)."""
    found = np.asarray(values, dtype=np.float64)
    return Bounds(1 - _upper(1 - found, alpha), _upper(found, alpha))


def num_needed(values: npt.ArrayLike, mean: float) -> int | None:
    """How many values like these show, in four of five runs, that their mean is below `mean`; of none, how many zeros.

    Returns:
        None where `MAX_SESSIONS` do not.
    """
    found = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(found if found.size else np.zeros(1), (_REPEATS, MAX_SESSIONS))
    shown = log_capital(drawn, mean) >= np.log(1 / ALPHA)
    numbers = np.sort(np.where(shown.any(axis=1), shown.argmax(axis=1) + 1, MAX_SESSIONS + 1))
    needed = int(numbers[int(_SURE * _REPEATS) - 1])
    return needed if needed <= MAX_SESSIONS else None


def _upper(values: Floats, alpha: float) -> float:
    """The smallest mean, to 1e-9, that the values have excluded; what they exclude grows with the mean."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_below(values, middle, alpha) else (middle, high)
    return high
