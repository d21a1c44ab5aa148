"""Every figure of a cell is what its definition says, over the prompts that count, and intervals are a bootstrap's."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fidelity_records import probe, shifts, trace
from pic_bench.fidelity.compared import make_cells, make_panels
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import Cell, Thresholds
from pic_bench.report.stats import Estimate, Statistic, bootstrap, bootstrap_ratio

THRESHOLDS = Thresholds()


def cells_of(probes: Sequence[Probe], thresholds: Thresholds = THRESHOLDS) -> list[Cell]:
    return make_cells(make_panels(probes, thresholds)[0], thresholds)


def cell_of(probes: Sequence[Probe], arm: str, thresholds: Thresholds = THRESHOLDS, **fields: object) -> Cell:
    """The one cell of an arm whose fields are these."""
    (found,) = [
        cell
        for cell in cells_of(probes, thresholds)
        if cell.arm == arm and all(getattr(cell, name) == value for name, value in fields.items())
    ]
    return found


def test_a_cell_by_hand() -> None:
    kls, scores = (0.1, 0.2, 0.3, 0.8), (1.0, 0.0, 0.5, 0.5)
    spliced = [
        probe(
            prompt=f"p{i}",
            kl=kl,
            cosine=1 - kl,
            top1_agrees=i != 3,
            top1_probability=(0.2, 0.4, 0.6, 0.9)[i],
            forced_kl=kl / 2,
            gold_nll=(1.0, 2.0, 3.0, 4.0)[i],
            greedy_tokens=64 if i else 0,
            agreed_tokens=(None, 64, 10, 3)[i],
            score=scores[i],
            exact_match=scores[i] == 1,
            key_error=0.1 * (i + 1) if i < 2 else None,
            prompt_tokens=100,
            prefix_hit_tokens=10,
            chunk_hit_tokens=60 + i,
        )
        for i, kl in enumerate(kls)
    ]
    full = [probe(arm="full", prompt=f"p{i}", kl=0.0, gold_nll=1.5, score=0.75) for i in range(4)]
    cell = cell_of([*spliced, *full], "seam-1")
    assert cell.n == 4
    assert cell.kl.value == pytest.approx(0.35)
    assert cell.kl_median.value == pytest.approx(0.25)
    assert cell.kl_p95 == pytest.approx(0.725)
    assert cell.kl_max == 0.8
    assert cell.cosine.value == pytest.approx(0.65)
    assert (cell.top1.value, cell.top1_probability) == (0.75, 0.5)
    assert cell.top1_decided is not None
    assert (cell.top1_decided.value, cell.top1_decided.n) == (0.5, 2)
    assert cell.forced_kl is not None
    assert cell.forced_kl.value == pytest.approx(0.175)
    assert cell.perplexity is not None
    assert cell.perplexity.value == pytest.approx(math.exp(2.5))
    assert cell.full_perplexity == pytest.approx(math.exp(1.5))
    assert cell.perplexity_ratio is not None
    assert cell.perplexity_ratio.value == pytest.approx(math.e)
    assert cell.agreed_tokens is not None
    assert (cell.agreed_tokens.value, cell.agreed_tokens.n) == (10, 3)
    assert cell.agrees_to_end is not None
    assert cell.agrees_to_end.value == pytest.approx(1 / 3)
    assert cell.score is not None
    assert (cell.score.value, cell.full_score) == (0.5, 0.75)
    assert cell.exact_match is not None
    assert cell.exact_match.value == 0.25
    assert cell.score_change is not None
    assert (cell.score_change.value, cell.score_change.n) == (-0.25, 4)
    assert cell.key_error is not None
    assert (cell.key_error.value, cell.key_error.n) == (pytest.approx(0.15), 2)
    assert (cell.prompt_tokens, cell.prefix_hit_tokens, cell.chunk_hit_tokens, cell.computed_tokens) == (
        (400, 40, 246, 114)
    )
    assert cell.against_floor is None


def test_what_was_not_measured_is_none() -> None:
    cell = cell_of([probe(), probe(prompt="p1")], "seam-1")
    missing = (cell.forced_kl, cell.perplexity, cell.perplexity_ratio, cell.full_perplexity, cell.agreed_tokens)
    assert (*missing, cell.agrees_to_end, cell.score, cell.exact_match, cell.score_change, cell.key_error) == (
        None,
    ) * 10


def exhaustive(of: Callable[[tuple[int, ...]], float], size: int) -> tuple[float, float]:
    """Bounds over every one of the `size ** size` equally likely resamples."""
    low, high = np.percentile([of(draw) for draw in itertools.product(range(size), repeat=size)], [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize("seed", range(4))
def test_intervals_are_those_of_all_resamples(seed: int) -> None:
    """Six values have 46,656 resamples; 2,000 drawn ones give bounds within a tenth of the width."""
    rng = random.Random(seed)
    values = [rng.lognormvariate(0, 1) for _ in range(6)]
    others = [rng.uniform(1, 2) for _ in range(6)]
    cases: list[tuple[Estimate | None, float, Callable[[tuple[int, ...]], float]]] = [
        (bootstrap(values), float(np.mean(values)), lambda draw: float(np.mean([values[i] for i in draw]))),
        (
            bootstrap_ratio(values, others),
            sum(values) / sum(others),
            lambda draw: sum(values[i] for i in draw) / sum(others[i] for i in draw),
        ),
    ]
    for estimate, value, of in cases:
        assert estimate is not None
        low, high = exhaustive(of, 6)
        assert estimate.value == pytest.approx(value)
        assert estimate.n == 6
        assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=(high - low) / 10)


def test_the_median_s_interval_is_of_medians() -> None:
    """A mean's interval would reach far beyond the middle values."""
    estimate = bootstrap([1.0, 2.0, 3.0, 4.0, 1000.0], statistic=Statistic.MEDIAN)
    assert estimate.value == 3
    assert (estimate.low, estimate.high) == (1, 1000)
    many = bootstrap([*([3.0] * 50), *([1000.0] * 10)], statistic=Statistic.MEDIAN)
    assert (many.low, many.value, many.high) == (3, 3, 3)


@pytest.mark.parametrize("statistic", list(Statistic))
def test_values_of_one_unit_are_drawn_together(statistic: Statistic) -> None:
    """Six units of one to three values: the bounds over all 46,656 draws of units, each with all that it holds."""
    rng = random.Random(5)
    units = [unit for unit in range(6) for _ in range(1 + unit % 3)]
    values = [unit + rng.random() for unit in units]
    of_unit = [[value for value, unit in zip(values, units, strict=True) if unit == number] for number in range(6)]
    of = np.mean if statistic is Statistic.MEAN else np.median
    low, high = exhaustive(lambda draw: float(of([value for i in draw for value in of_unit[i]])), 6)
    estimate = bootstrap(values, units, statistic=statistic)
    assert (estimate.value, estimate.n) == (pytest.approx(float(of(values))), 12)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=(high - low) / 10)
    apart, plain = bootstrap(values, range(12), statistic=statistic), bootstrap(values, statistic=statistic)
    assert (apart.low, apart.high) == pytest.approx((plain.low, plain.high))


def test_calls_of_one_session_are_no_independent_prompts() -> None:
    """Forty calls of two sessions that differ: an interval over calls would exclude either session's value."""
    kls = {"000": 0.1, "001": 0.3}
    names = [f"{order}{session}-{i:03}" for order in ("", "reversed/") for session in kls for i in range(10)]
    probes = [probe(experiment=Experiment.TRACE, prompt=name, kl=kls[name[-7:-4]]) for name in names]
    cell = cell_of(probes, "seam-1")
    assert (cell.n, cell.kl.low, cell.kl.value, cell.kl.high) == pytest.approx((40, 0.1, 0.2, 0.3))


def test_a_ratio_resamples_both_sums_alike() -> None:
    """Half of every denominator: whatever units are drawn, the ratio is one half."""
    values = [float(2**i) for i in range(10)]
    estimate = bootstrap_ratio(values, [2 * value for value in values])
    assert estimate == Estimate(value=0.5, low=0.5, high=0.5, n=10)


def test_a_ratio_of_nothing_is_none() -> None:
    assert bootstrap_ratio([1.0], [0.0]) is None
    assert bootstrap_ratio([], []) is None


def test_arms_are_compared_by_prompt() -> None:
    """The prompts differ far more than the arms, so that only pairs show the difference."""
    rng = random.Random(5)
    probes = []
    for i in range(40):
        hardness = rng.uniform(0.1, 10)
        probes.append(probe(arm="exact", prompt=f"p{i}", kl=hardness))
        probes.append(probe(arm="seam-1", prompt=f"p{i}", kl=hardness + rng.uniform(0.01, 0.02)))
    random.Random(1).shuffle(probes)
    seam, exact = cell_of(probes, "seam-1"), cell_of(probes, "exact")
    assert seam.kl.low < exact.kl.high
    assert seam.against_floor is not None
    assert seam.against_floor.baseline == "exact"
    assert 0.01 <= seam.against_floor.kl.low < seam.against_floor.kl.high <= 0.02


def test_prompts_of_one_arm_only_are_not_paired() -> None:
    probes = [probe(prompt=f"p{i}", kl=1.0 + i, top1_agrees=i > 0) for i in range(5)]
    probes += [probe(arm="exact", prompt=f"p{i}", kl=0.5) for i in range(2, 8)]
    against = cell_of(probes, "seam-1").against_floor
    assert against is not None
    assert (against.n, against.unpaired) == (3, 5)
    assert against.kl.value == pytest.approx((2.5 + 3.5 + 4.5) / 3)
    assert against.top1.value == 0
    assert cell_of(probes, "seam-1").kl.value == 3


def test_the_floor_is_the_exact_hit_else_the_second_full_prefill() -> None:
    probes = [probe(), probe(arm="retest", kl=0.0), probe(arm="full", kl=0.0)]
    cell = cell_of(probes, "seam-1")
    assert cell.against_floor is not None
    assert cell.against_floor.baseline == "retest"
    assert [cell_of(probes, arm).against_floor for arm in ("full", "retest")] == [None, None]


def test_a_later_record_replaces_an_earlier_one() -> None:
    probes = [probe(kl=9.0), probe(kl=1.0), probe(prompt="p1", kl=3.0)]
    panels, repeated = make_panels(probes, THRESHOLDS)
    assert repeated == 1
    assert cell_of(probes, "seam-1").kl.value == 2
    assert len(panels) == 1


def test_shifts_are_kept_apart_and_questions_are_pooled() -> None:
    assert [cell.shift for cell in cells_of(list(shifts())) if cell.arm == "naive"] == [1, 16, 64, 256, 1024, 4096]
    common = {"experiment": Experiment.QA, "score": 1.0}
    probes = [probe(prompt=f"q{n}", num_blocks=n, shift=n, **common) for n in (2, 3)]
    # The same name under another number of blocks is another prompt.
    probes.append(probe(prompt="q2", num_blocks=7, **common))
    (cell,) = cells_of(probes)
    assert (cell.n, cell.num_blocks, cell.shift) == (3, None, None)


def test_calls_that_reuse_much_are_chosen_by_the_default_policy() -> None:
    probes = list(trace())
    everywhere = cell_of(probes, "seam-32", min_chunk_hit=0)
    chosen = cell_of(probes, "seam-32", min_chunk_hit=256)
    reusing = {p.prompt for p in probes if p.arm == "default" and p.chunk_hit_tokens >= 256}
    assert (everywhere.n, chosen.n) == (90, len(reusing))
    # Chosen by the default policy's chunk hits, not by the policy's own, which are fewer.
    assert chosen.n > len([p for p in probes if p.arm == "seam-32" and p.chunk_hit_tokens >= 256])
    assert chosen.against_floor is not None
    assert chosen.against_floor.computed_share is not None
    of = {arm: sum(computed(p) for p in probes if p.arm == arm and p.prompt in reusing) for arm in ("seam-32", "exact")}
    assert chosen.against_floor.computed_share.value == pytest.approx(of["seam-32"] / of["exact"])
    assert cell_of(probes, "exact", min_chunk_hit=256).n == chosen.n


def computed(record: Probe) -> int:
    return record.prompt_tokens - record.prefix_hit_tokens - record.chunk_hit_tokens


def test_a_trace_with_another_default_has_no_chosen_calls() -> None:
    probes = list(trace(calls=12))
    assert {cell.min_chunk_hit for cell in cells_of(probes, Thresholds(default_policy="none"))} == {0}
    assert {cell.min_chunk_hit for cell in cells_of(probes, Thresholds(default_policy="seam-8", min_chunk_hit=10))} == {
        0,
        10,
    }


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
    found = [(cell.dtype, cell.donors, cell.arm) for cell in cells_of(probes)]
    assert [dtype for dtype, _, _ in found] == ["float32"] * 8 + ["bfloat16"] * 7
    assert [arm for _, _, arm in found[:8]] == [
        *("full", "retest", "exact", "naive", "seam-0", "seam-4", "seam-32"),
        "seam-0",
    ]
