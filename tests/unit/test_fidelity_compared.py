"""Which prompts count and are paired, and what an interval says; `test_kept_runs` has the figures of real records."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fidelity_records import probe, recorded
from pic_bench.fidelity.arms import Arm
from pic_bench.fidelity.cases.case import Case
from pic_bench.fidelity.compared import check_naive, make_cells, make_comparisons, make_panels
from pic_bench.fidelity.measure import Reference, compare
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import Cell, Comparison, Thresholds
from pic_bench.fidelity.tables import cell_table, comparisons_table
from pic_bench.report.stats import Statistic, bootstrap

THRESHOLDS = Thresholds()
NAIVE = "not rotated less rotated, seam 1"


def cells_of(probes: Sequence[Probe], thresholds: Thresholds = THRESHOLDS) -> list[Cell]:
    return make_cells(make_panels(probes, thresholds)[0], thresholds)


def cell_of(probes: Sequence[Probe], arm: str) -> Cell:
    """The one cell of an arm."""
    (found,) = [cell for cell in cells_of(probes) if cell.arm == arm]
    return found


def test_what_was_not_measured_is_none() -> None:
    cell = cell_of([probe(), probe(prompt="p1")], "seam-1")
    missing = (cell.forced_kl, cell.nll_change, cell.agreed_tokens, cell.score, cell.exact_match, cell.score_change)
    assert (*missing, cell.key_error, cell.recovery) == (None,) * 8


def test_flips_are_counted_where_the_full_prefill_is_sure() -> None:
    """Likeliest tokens of four forced positions; at the third the full prefill hesitates."""
    text: Any = SimpleNamespace(text=str)
    case = Case(experiment=Experiment.GRID, name="p0", source="s", prompt=[1] * 9, gold=[1, 2, 3, 4])
    full, this = (recorded(positions=5, vocab=8) for _ in range(2))
    for at, (one, other) in enumerate([(1, 1), (2, 5), (3, 6), (4, 4)]):
        full.logits[at, one] = 9.0 if at != 2 else 2.0
        this.logits[at, other] = 9.0
    found = compare(Reference(full), this, Arm(name="seam-1", donors=Donors.ISOLATED), case, "float32", text)
    assert (found.sure_tokens, found.sure_flips, found.forced_agreement) == (3, 1, 0.5)
    again = msgspec.structs.replace(found, prompt="p1", sure_tokens=5, sure_flips=0)
    table = cell_table([cell_of([found, again], "seam-1")])
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["forced top-1"][:6], row["sure tokens flipped"]) == ("50.0 %", "12.5 % of 8")
    old = cell_of([probe(), probe(prompt="p1", sure_tokens=5, sure_flips=0)], "seam-1")
    assert old.sure is None


DRAWS = np.array(list(itertools.product(range(5), repeat=5)))
"""Every one of the 3,125 equally likely resamples of five things."""


@pytest.mark.parametrize("statistic", list(Statistic))
@pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"up to {most} values a unit")
def test_intervals_are_those_of_all_draws_of_units(statistic: Statistic, most: int) -> None:
    """The bounds over all 3,125 draws of five units, each with all that it holds."""
    rng = random.Random(5)
    units = [unit for unit in range(5) for _ in range(1 + unit % most)]
    values = [unit + rng.random() for unit in units]
    of_unit = [[value for value, unit in zip(values, units, strict=True) if unit == number] for number in range(5)]
    of = np.mean if statistic is Statistic.MEAN else np.median
    estimate = bootstrap(values, units, statistic=statistic)
    assert (estimate.value, estimate.n) == (pytest.approx(float(of(values))), len(units))
    resampled = [of([value for i in draw for value in of_unit[i]]) for draw in DRAWS]
    low, high = np.percentile(resampled, [2.5, 97.5])
    # 2,000 drawn resamples give bounds within a tenth of the width over all.
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=(high - low) / 10)
    if most == 1:
        alone = bootstrap(values, statistic=statistic)
        assert (alone.low, alone.value, alone.high) == pytest.approx((estimate.low, estimate.value, estimate.high))


def test_prompts_of_one_arm_only_are_not_paired() -> None:
    probes = [probe(prompt=f"p{i}", kl=1.0 + i, top1_agrees=i > 0) for i in range(5)]
    probes += [probe(arm="exact", prompt=f"p{i}", kl=0.5) for i in range(2, 8)]
    cell = cell_of(probes, "seam-1")
    assert (cell.against_floor.n, cell.against_floor.unpaired) == (3, 5)
    assert cell.against_floor.kl.value == pytest.approx((2.5 + 3.5 + 4.5) / 3)
    assert (cell.against_floor.top1.value, cell.kl.value) == (0, 3)
    # Without exact hits the floor is the second full prefill, which has none itself.
    probes = [probe(), probe(arm="retest", kl=0.0), probe(arm="full", kl=0.0)]
    assert cell_of(probes, "seam-1").against_floor.baseline == "retest"
    assert [cell_of(probes, arm).against_floor for arm in ("full", "retest")] == [None, None]


def test_panels_pool_questions_and_have_the_last_record_of_a_prompt() -> None:
    common = {"experiment": Experiment.QA, "score": 1.0}
    # The same name under another number of blocks is another prompt.
    probes = [probe(prompt=f"q{n}", num_blocks=n, **common) for n in (2, 3)]
    probes += [probe(prompt="q2", num_blocks=7, kl=kl, **common) for kl in (9.0, 0.04)]
    panels, repeated = make_panels(probes, THRESHOLDS)
    assert (len(panels), repeated) == (1, 1)
    (cell,) = cells_of(probes)
    assert (cell.n, cell.num_blocks, cell.kl.value) == (3, None, pytest.approx(0.02))


@pytest.mark.parametrize(("probability", "undecided"), [(0.29, True), (0.3, False)])
def test_a_cell_is_undecided_by_the_median(probability: float, undecided: bool) -> None:
    probes = [probe(prompt=f"p{i}", top1_probability=p) for i, p in enumerate((0.01, probability, 0.99))]
    assert cell_of(probes, "seam-1").undecided is undecided


@pytest.mark.parametrize(("scores", "incompetent"), [((0.0, 0.3), True), ((0.1, 0.3), False), ((None, None), True)])
def test_questions_are_beyond_the_model_by_the_full_prefill_s_mean(
    scores: tuple[float | None, ...], incompetent: bool
) -> None:
    probes = [probe(arm="full", experiment=Experiment.QA, prompt=f"q{i}", score=s) for i, s in enumerate(scores)]
    probes += [probe(experiment=Experiment.QA, prompt=f"q{i}", score=1.0) for i in range(2)]
    assert cell_of(probes, "seam-1").incompetent is incompetent
    assert not cell_of([probe(), probe(arm="full")], "seam-1").incompetent


def compared(probes: Sequence[Probe], what: str = NAIVE) -> list[Comparison]:
    return [one for one in make_comparisons(make_panels(probes, THRESHOLDS)[0]) if one.what == what]


def interval(comparisons: Sequence[Comparison]) -> str:
    """The last column of the only row."""
    (row,) = comparisons_table(comparisons, min_prompts=20).rows
    return row[-1]


def two_arms(
    first: Callable[[int], float], second: Callable[[int], float], prompts: int = 30, **fields: object
) -> list[Probe]:
    """The unrotated and the rotated arm, KL by number of the prompt."""
    kls = {"naive": first, "seam-1": second}
    return [
        probe(arm=arm, prompt=f"p{i}", kl=kl(i), forced_kl=kl(i), **fields)
        for arm, kl in kls.items()
        for i in range(prompts)
    ]


@pytest.mark.parametrize(
    ("first", "second", "prompts", "side"),
    [
        (lambda i: 0.01, lambda i: 0.5 + i % 2 / 10, 30, "below 0"),
        (lambda i: 0.1 + (-1) ** i * 0.05, lambda i: 0.1, 30, "includes 0"),
        (lambda i: 0.5 + i / 100, lambda i: 0.01, 20, "above 0"),
        (lambda i: 0.5 + i / 100, lambda i: 0.01, 19, "too few"),
    ],
)
def test_the_interval_s_side_is_said_of_enough_prompts(
    first: Callable[[int], float], second: Callable[[int], float], prompts: int, side: str
) -> None:
    assert interval(compared(two_arms(first, second, prompts))) == side


def test_the_check_holds_only_where_the_naive_arm_is_worse_beyond_chance() -> None:
    (checked,) = check_naive(two_arms(lambda i: 0.5 + i / 100, lambda i: 0.01 * i, 10))
    assert checked.holds
    assert (checked.difference.n, checked.difference.value) == (10, pytest.approx(0.5))
    assert str(checked).startswith("check holds: float32: mean KL without rotation less with it 0.5 [")
    assert not check_naive(two_arms(lambda i: i % 2, lambda i: (i + 1) % 2, 10))[0].holds
    (lucky,) = check_naive(two_arms(lambda i: (i + 1) % 2, lambda i: i % 2, 11))
    assert lucky.difference.value > 0
    assert not lucky.holds
    (alone,) = check_naive([probe(arm="naive", forced_kl=1.0)])
    assert not alone.holds, "nothing to pair is no pass"
    assert str(alone) == "check FAILS: float32: no prompt has both arms"
    assert check_naive([]) == []
