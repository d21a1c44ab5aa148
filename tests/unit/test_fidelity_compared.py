"""Every figure is what its definition says over the prompts that count; arms are paired by prompt, units are drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fidelity_records import grid, probe, questions, recorded, shifts, trace
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


def cell_of(probes: Sequence[Probe], arm: str, **fields: object) -> Cell:
    """The one cell of an arm whose fields are these."""
    (found,) = [
        cell
        for cell in cells_of(probes)
        if cell.arm == arm and all(getattr(cell, name) == value for name, value in fields.items())
    ]
    return found


def test_a_cell_by_hand() -> None:
    columns = {
        "kl": (0.1, 0.2, 0.3, 0.8),
        "cosine": (0.9, 0.8, 0.7, 0.2),
        "top1_agrees": (True, True, True, False),
        "top1_probability": (0.2, 0.4, 0.6, 0.9),
        "forced_kl": (0.05, 0.1, 0.15, 0.4),
        "gold_nll": (1.0, 2.0, 3.0, 4.0),
        "greedy_tokens": (0, 64, 64, 64),
        "agreed_tokens": (None, 64, 10, 3),
        "score": (1.0, 0.0, 0.5, 0.5),
        "exact_match": (True, False, False, False),
        "key_error": (0.1, 0.2, None, None),
        "chunk_hit_tokens": (60, 61, 62, 63),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    spliced = [probe(prompt=f"p{i}", prompt_tokens=100, prefix_hit_tokens=10, **row) for i, row in enumerate(rows)]
    full = [probe(arm="full", prompt=f"p{i}", kl=0.0, gold_nll=1.5, score=0.75) for i in range(4)]
    cell = cell_of([*spliced, *full], "seam-1")
    of_estimates = {
        "kl": (0.35, 4),
        "cosine": (0.65, 4),
        "top1": (0.75, 4),
        "top1_decided": (0.5, 2),
        "forced_kl": (0.175, 4),
        "nll_change": (1.0, 4),
        "agreed_tokens": (77 / 3, 3),
        "score": (0.5, 4),
        "exact_match": (0.25, 4),
        "score_change": (-0.25, 4),
        "key_error": (0.15, 2),
    }
    found = {name: getattr(cell, name) for name in of_estimates}
    assert {name: (one.value, one.n) for name, one in found.items()} == {
        name: (pytest.approx(value), n) for name, (value, n) in of_estimates.items()
    }
    assert (cell.n, cell.kl_max, cell.undecided, cell.against_floor) == (4, 0.8, False, None)
    assert (cell.kl_median, cell.kl_p95) == pytest.approx((0.25, 0.725))
    assert (cell.prompt_tokens, cell.chunk_hit_tokens, cell.computed_tokens) == (400, 246, 114)


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


def test_whole_answers_are_alike_where_all_of_32_tokens_are() -> None:
    same = [(64, 64), (64, 32), (64, 31), (16, 16), (0, None)]
    probes = [probe(prompt=f"p{i}", greedy_tokens=all_, agreed_tokens=n) for i, (all_, n) in enumerate(same)]
    alike = cell_of(probes, "seam-1").answers_alike
    assert (alike.value, alike.n) == (pytest.approx(2 / 3), 3)


DRAWS = np.array(list(itertools.product(range(6), repeat=6)))
"""Every one of the 46,656 equally likely resamples of six things."""


@pytest.mark.parametrize("statistic", list(Statistic))
@pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"up to {most} values a unit")
def test_intervals_are_those_of_all_draws_of_units(statistic: Statistic, most: int) -> None:
    """The bounds over all 46,656 draws of six units, each with all that it holds."""
    rng = random.Random(5)
    units = [unit for unit in range(6) for _ in range(1 + unit % most)]
    values = [unit + rng.random() for unit in units]
    of_unit = [[value for value, unit in zip(values, units, strict=True) if unit == number] for number in range(6)]
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


def test_calls_of_one_session_are_no_independent_prompts() -> None:
    """Forty calls of two sessions that differ: an interval over calls would exclude either session's value."""
    kls = {"000": 0.1, "001": 0.3}
    names = [f"{order}{session}-{i:03}" for order in ("", "reversed/") for session in kls for i in range(10)]
    probes = [probe(experiment=Experiment.TRACE, prompt=name, kl=kls[name[-7:-4]]) for name in names]
    cell = cell_of(probes, "seam-1")
    assert (cell.n, cell.kl.low, cell.kl.value, cell.kl.high) == pytest.approx((40, 0.1, 0.2, 0.3))


def test_arms_are_compared_by_prompt() -> None:
    """The prompts differ far more than the arms, so that only pairs show the difference."""
    probes = [probe(arm="exact", prompt=f"p{i}", kl=i) for i in range(40)]
    probes += [probe(prompt=f"p{i}", kl=i + 0.01 + 0.01 * (i % 2)) for i in reversed(range(40))]
    seam, exact = cell_of(probes, "seam-1"), cell_of(probes, "exact")
    assert seam.kl.low < exact.kl.high
    assert seam.against_floor.baseline == "exact"
    assert 0.01 < seam.against_floor.kl.low < seam.against_floor.kl.high < 0.02


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


def test_panels_keep_shifts_apart_pool_questions_and_have_the_last_record_of_a_prompt() -> None:
    assert [cell.shift for cell in cells_of(list(shifts())) if cell.arm == "naive"] == [1, 16, 64, 256, 1024, 4096]
    common = {"experiment": Experiment.QA, "score": 1.0}
    # The same name under another number of blocks is another prompt.
    probes = [probe(prompt=f"q{n}", num_blocks=n, shift=n, **common) for n in (2, 3)]
    probes += [probe(prompt="q2", num_blocks=7, kl=kl, **common) for kl in (9.0, 0.04)]
    panels, repeated = make_panels(probes, THRESHOLDS)
    assert (len(panels), repeated) == (1, 1)
    (cell,) = cells_of(probes)
    assert (cell.n, cell.num_blocks, cell.shift, cell.kl.value) == (3, None, None, pytest.approx(0.02))


def test_calls_that_reuse_much_are_chosen_by_the_default_policy() -> None:
    probes = list(trace())
    everywhere = cell_of(probes, "seam-32", min_chunk_hit=0)
    chosen = cell_of(probes, "seam-32", min_chunk_hit=256)
    reusing = {p.prompt for p in probes if p.arm == "default" and p.chunk_hit_tokens >= 256}
    assert (everywhere.n, chosen.n) == (90, len(reusing))
    # Chosen by the default policy's chunk hits, not by the policy's own, which are fewer.
    assert chosen.n > len([p for p in probes if p.arm == "seam-32" and p.chunk_hit_tokens >= 256])
    of = {arm: [p for p in probes if p.arm == arm and p.prompt in reusing] for arm in ("seam-32", "exact")}
    seam, exact = (sum(p.computed_tokens for p in some) for some in of.values())
    assert chosen.against_floor.computed_share == pytest.approx(seam / exact)
    assert cell_of(probes, "exact", min_chunk_hit=256).n == chosen.n


@pytest.mark.parametrize(("default", "least", "found"), [("none", 256, {0}), ("seam-8", 10, {0, 10})])
def test_a_trace_with_another_default_has_no_chosen_calls(default: str, least: int, found: set[int]) -> None:
    thresholds = Thresholds(default_policy=default, min_chunk_hit=least)
    assert {cell.min_chunk_hit for cell in cells_of(list(trace(calls=12)), thresholds)} == found


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


def test_cells_come_in_the_order_of_the_tables() -> None:
    arms = ["seam-32", "naive", "seam-4", "exact", "seam-0", "full", "retest"]
    probes = [probe(arm=arm, dtype=dtype) for dtype in ("bfloat16", "float32") for arm in arms]
    probes.append(probe(arm="seam-0", donors=Donors.CONTEXT))
    cells = cells_of(probes)
    assert [cell.dtype for cell in cells] == ["float32"] * 8 + ["bfloat16"] * 7
    in_order = ["full", "retest", "exact", "naive", "seam-0", "seam-4", "seam-32", "seam-0"]
    assert [cell.arm for cell in cells[:8]] == in_order


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


def test_a_comparison_by_hand() -> None:
    found = compared(two_arms(lambda i: 0.5 + i % 2 / 10, lambda i: 0.01))
    (one,) = found
    assert (one.n, one.num_units, one.where) == (30, 30, "float32, grid, alone")
    assert (one.first, one.second, one.difference.value) == pytest.approx((0.55, 0.01, 0.54))
    (row,) = comparisons_table(found, min_prompts=20).rows
    assert row[:5] == [NAIVE, "float32, grid, alone", "30", ".55", ".010"]
    assert row[5].startswith("+.54 [+.5")
    assert row[6:] == ["above 0"]


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


def test_a_prompt_counts_once_however_many_records_it_has_and_texts_of_one_passage_are_one_unit() -> None:
    probes = [p for blocks in (1, 2, 4) for p in two_arms(lambda i: 0.5, lambda i: 0.1, 12, num_blocks=blocks)]
    (one,) = compared(probes)
    assert (one.n, interval([one])) == (12, "too few")
    (one,) = compared(list(shifts()))
    assert (one.n, one.num_units) == (144, 24)


def test_the_grid_s_comparisons() -> None:
    """The invented records have an effect of the usual direction in each of them, twice: by dtype, and by donors.

    Questions and traces are not compared so.
    """
    probes = list(grid())
    wheres = {f"{d}, grid, {w}" for d in ("float32", "bfloat16") for w in ("alone", "in context")}
    for what in (NAIVE, "seam 0 less seam 1", "seam 1 less seam 32", "seam 1 less exact hit"):
        found = compared(probes, what)
        assert all(one.difference.low > 0 for one in found)
        assert {one.where for one in found} == wheres
    assert make_comparisons(make_panels([*questions(prompts=4), *trace(calls=12)], THRESHOLDS)[0]) == []
    donors = compared(probes, "donors alone less in context, seam 1")
    assert [one.difference.low > 0 for one in donors] == [True] * 2


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
    near = two_arms(lambda i: 0.5, lambda i: 0.1, experiment=Experiment.SHIFT, shift=1)
    assert check_naive(near) == check_naive([]) == []
