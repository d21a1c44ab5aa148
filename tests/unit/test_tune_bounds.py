"""The bounds of `tune`: they hold at every moment for losses with heavy tails, and need few sessions."""

from __future__ import annotations

import numpy as np
import pytest
from pic_bench.tune.bounds import MAX_SESSIONS, bounds, is_below, log_capital, num_needed

BUDGET = 0.2
"""Of a budget of .01 and a cap of .05."""
ENOUGH = np.log(1 / 0.05)


def heavy(mean: float, shape: tuple[int, int], *, tail: float, seed: int = 0) -> np.ndarray:
    """Losses of a log-normal law, capped at 1, so scaled that their mean after the cap is `mean`."""
    law = np.exp(tail * np.random.default_rng(99).standard_normal(200_000))
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * law).mean() < mean else (low, middle)
    return np.minimum(1, low * np.exp(tail * np.random.default_rng(seed).standard_normal(shape)))


LAWS = {
    "mild": heavy(1.01 * BUDGET, (1000, 300), tail=0.5),
    "heavy": heavy(1.01 * BUDGET, (1000, 300), tail=2.0),
    "mostly nothing": heavy(1.01 * BUDGET, (1000, 300), tail=5.0),
    "nothing or all": (np.random.default_rng(1).random((1000, 300)) < 1.01 * BUDGET).astype(float),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_mean_above_the_budget_is_certified_in_one_run_of_twenty_at_most(law: str) -> None:
    """Whenever one looks. The same runs tell a wrong bound: a plain mean that is watched is below in most of them."""
    losses = LAWS[law]
    assert (log_capital(losses, BUDGET) >= ENOUGH).any(axis=1).mean() <= 0.05
    watched = losses.cumsum(axis=1) / np.arange(1, 301)
    assert (watched[:, 14:] < BUDGET).any(axis=1).mean() > 0.4


def test_bounds_enclose_the_mean_and_close_in() -> None:
    losses = heavy(0.05, (40, 400), tail=1.5, seed=3)
    found = [bounds(run) for run in losses]
    assert np.mean([low <= 0.05 <= high for low, high in found]) >= 0.9
    assert np.mean([high for _, high in found]) < 0.1
    widths = [np.ptp(bounds(losses[0][:n])) for n in (10, 40, 400)]
    assert widths == sorted(widths, reverse=True)
    assert bounds([]) == (pytest.approx(0), pytest.approx(1))


def test_a_certificate_is_a_bound_below_the_budget_and_stays_one() -> None:
    for run in heavy(0.08, (20, 60), tail=1.5, seed=4):
        assert is_below(run, BUDGET) == (bounds(run).high < BUDGET)
        if is_below(run[:40], BUDGET):
            assert is_below(run, BUDGET), "bounds hold at any stopping time"


def test_it_says_how_many_sessions_it_takes() -> None:
    losses = heavy(0.05, (1, 400), tail=1.5, seed=5)[0]
    least, likely, near = (num_needed(values, BUDGET) for values in ([], losses, np.minimum(1, losses + 0.12)))
    assert least is not None
    assert likely is not None
    assert near is not None
    assert 14 <= least <= 18
    assert 17 <= likely <= 30
    assert likely < near < MAX_SESSIONS
    assert num_needed(np.minimum(1, losses + 0.2), BUDGET) is None
    assert is_below([0.0] * least, BUDGET)
    assert not is_below([0.0] * (least - 1), BUDGET)
