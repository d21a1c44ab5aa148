"""What is counted, by hand and by slow references, what intervals and the bounds of tune say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from pic_bench.fidelity import metrics
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.compared import make_cells, make_panels
from pic_bench.fidelity.measure import Reference, compare
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.report import cell_table
from pic_bench.fidelity.summary import Cell
from pic_bench.report.stats import bootstrap
from pic_bench.tune.bounds import bounds, is_below, log_capital

from tests.helpers.fidelity_records import probe, recorded


def cell_of(probes: Sequence[Probe]) -> Cell:
    """The only cell of these records."""
    (found,) = make_cells(make_panels(probes, 256)[0])
    return found


def test_flips_are_counted_where_the_full_prefill_is_sure() -> None:
    """Likeliest tokens of four forced positions; at the third the full prefill hesitates."""
    text: Any = SimpleNamespace(text=str)
    case = Case(name="p0", source="s", prompt=[1] * 9, gold=[1, 2, 3, 4])
    full, this = (recorded(positions=5, vocab=8) for _ in range(2))
    for at, (one, other) in enumerate([(1, 1), (2, 5), (3, 6), (4, 4)]):
        full.logits[at, one] = 9.0 if at != 2 else 2.0
        this.logits[at, other] = 9.0
    found = compare(Reference(full), this, Arm(name="seam-1"), case, "float32", text)
    assert (found.sure_tokens, found.sure_flips, found.forced_agreement) == (3, 1, 0.5)
    again = msgspec.structs.replace(found, prompt="p1", sure_tokens=5, sure_flips=0)
    table = cell_table([cell_of([found, again])])
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["forced top-1"][:6], row["sure tokens flipped"]) == ("50.0 %", "12.5 % of 8")
    assert cell_of([probe(), probe(prompt="p1", sure_tokens=5, sure_flips=0)]).sure is None


DRAWS = np.array(list(itertools.product(range(5), repeat=5)))
"""Every one of the 3,125 equally likely resamples of five things."""


@pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"up to {most} values a unit")
def test_intervals_are_those_of_all_draws_of_units(most: int) -> None:
    """The bounds over all 3,125 draws of five units, each with all that it holds."""
    rng = random.Random(5)
    units = [unit for unit in range(5) for _ in range(1 + unit % most)]
    values = [unit + rng.random() for unit in units]
    of_unit = [[value for value, unit in zip(values, units, strict=True) if unit == number] for number in range(5)]
    estimate = bootstrap(values, units)
    assert (estimate.value, estimate.n) == (pytest.approx(float(np.mean(values))), len(units))
    resampled = [np.mean([value for i in draw for value in of_unit[i]]) for draw in DRAWS]
    low, high = np.percentile(resampled, [2.5, 97.5])
    # 2,000 drawn resamples give bounds within a tenth of the width over all.
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=(high - low) / 10)
    if most == 1:
        alone = bootstrap(values)
        assert (alone.low, alone.value, alone.high) == pytest.approx((estimate.low, estimate.value, estimate.high))


def test_log_softmax_and_divergence_by_hand_and_in_the_right_direction() -> None:
    rows = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0]], dtype=np.float32)
    np.testing.assert_allclose(np.exp(metrics.log_softmax(rows)), [[0.25, 0.75], [0.5, 0.5]], rtol=1e-7)
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert metrics.divergence(p, q)[0] == pytest.approx(forward, rel=1e-12)
    assert metrics.divergence(q, p)[0] == pytest.approx(backward, rel=1e-12)
    assert metrics.divergence(p, p)[0] == 0.0


def test_answers_are_compared_as_squad_compares_them() -> None:
    """The best gold answer counts, and the first line only; retrieval asks for the whole value."""
    assert metrics.normalise(" The  Quick, brown-fox! ") == "quick brownfox"
    assert metrics.word_f1("red house", "big red house") == pytest.approx(0.8)
    assert metrics.word_f1("red red", "red") == pytest.approx(2 / 3), "a word counts as often as it is in both"
    assert metrics.word_f1("red red", "red red blue") == pytest.approx(0.8)
    assert metrics.word_f1("", "") == 1.0
    assert metrics.word_f1("blue", "red") == 0.0
    score = metrics.score_answer("\nExeter College.\nAnd more words", ["Oxford", "the Exeter College"], contains=False)
    assert score == 1.0
    partly = metrics.score_answer("at Exeter College", ["Exeter College"], contains=False)
    assert partly == pytest.approx(0.8)


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


def test_a_certificate_is_a_bound_below_the_budget_and_stays_one() -> None:
    for run in heavy(0.08, (20, 60), tail=1.5, seed=4):
        assert is_below(run, BUDGET) == (bounds(run).high < BUDGET)
        if is_below(run[:40], BUDGET):
            assert is_below(run, BUDGET), "bounds hold at any stopping time"
