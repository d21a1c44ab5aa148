"""Statistics of every cell: means, medians, shares and paired differences with bootstrap intervals.

Intervals are over prompts; over sessions where prompts are calls of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pic_bench.fidelity.panels import Panel, pair_arms
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Contrast, Thresholds, seam_of
from pic_bench.report.stats import Estimate, Statistic, bootstrap, bootstrap_ratio

_PLACE = ("experiment", "dtype", "source", "num_blocks", "shift", "min_chunk_hit")
_MEANS = ("kl", "cosine", "forced_kl", "score", "exact_match", "key_error")
_SUMS = ("prompt_tokens", "prefix_hit_tokens", "chunk_hit_tokens", "block_tokens", "computed_tokens")


def make_cells(panels: Sequence[Panel], thresholds: Thresholds) -> list[Cell]:
    """A cell for every arm of every panel: controls first, then by donors, unrotated, seam length and policy."""
    return [
        _cell(panel, donors, arm, thresholds)
        for panel in panels
        for donors, arm in sorted(panel.arms, key=lambda key: _order(key[0], key[1], thresholds))
    ]


def _cell(panel: Panel, donors: Donors, arm: str, thresholds: Thresholds) -> Cell:
    records = panel.arms[donors, arm]
    probes = list(records.values())
    with_full = pair_arms(records, panel.arm("full", donors)).pairs
    floor = panel.floor(donors)
    kls = [probe.kl for probe in probes]
    decided = [p for p in probes if p.top1_probability >= thresholds.decided_probability]
    probability = float(np.median([p.top1_probability for p in probes]))
    greedy = [p for p in probes if p.agreed_tokens is not None and p.greedy_tokens]
    full_nll = _mean([full for _, _, full in _both(with_full, "gold_nll")])
    return Cell(
        **{name: getattr(panel, name) for name in _PLACE},
        donors=donors,
        arm=arm,
        n=len(probes),
        num_units=len({probe.unit for probe in probes}),
        **{name: _estimate(probes, name) for name in _MEANS},
        kl_median=_estimate(probes, "kl", Statistic.MEDIAN),
        kl_p95=float(np.percentile(kls, 95)),
        kl_max=max(kls),
        top1=_estimate(probes, "top1_agrees"),
        top1_decided=_estimate(decided, "top1_agrees"),
        top1_probability=probability,
        undecided=probability < thresholds.competent_probability,
        perplexity=_exponential(_estimate(probes, "gold_nll")),
        full_perplexity=math.exp(full_nll) if full_nll is not None else None,
        perplexity_ratio=_exponential(_difference(with_full, "gold_nll")),
        agreed_tokens=_estimate(greedy, "agreed_tokens", Statistic.MEDIAN),
        agrees_to_end=_estimate(greedy, "agrees_to_end"),
        full_score=_mean([full for _, _, full in _both(with_full, "score")]),
        score_change=_difference(with_full, "score"),
        incompetent=_is_incompetent(panel, donors, thresholds),
        **{name: sum(getattr(probe, name) for probe in probes) for name in _SUMS},
        against_floor=None if floor in (None, arm) or arm == "full" else _contrast(panel, donors, arm, str(floor)),
    )


def _contrast(panel: Panel, donors: Donors, arm: str, baseline: str) -> Contrast | None:
    """`arm` less `baseline`, paired by prompt; None where they share no prompt."""
    pairs, unpaired = pair_arms(panel.arm(arm, donors), panel.arm(baseline, donors))
    if not pairs:
        return None
    computed = [[probe.computed_tokens for probe in side] for side in zip(*pairs, strict=True)]
    return Contrast(
        baseline=baseline,
        n=len(pairs),
        unpaired=unpaired,
        kl=_difference(pairs, "kl"),
        top1=_difference(pairs, "top1_agrees"),
        forced_kl=_difference(pairs, "forced_kl"),
        computed_share=bootstrap_ratio(*computed, units=[first.unit for first, _ in pairs]),
    )


def _is_incompetent(panel: Panel, donors: Donors, thresholds: Thresholds) -> bool:
    """Whether the full prefill's mean score is too low; unknown counts as too low, no questions at all do not."""
    if panel.experiment is not Experiment.QA:
        return False
    scores = [probe.score for probe in panel.arm("full", donors).values() if probe.score is not None]
    return not scores or sum(scores) / len(scores) < thresholds.competent_score


def _estimate(probes: Sequence[Probe], field: str, statistic: Statistic = Statistic.MEAN) -> Any:
    """The `Estimate` of a field over the records that have a value; None where no record has one."""
    found = [(float(value), probe.unit) for probe in probes if (value := getattr(probe, field)) is not None]
    return bootstrap(*zip(*found, strict=True), statistic=statistic) if found else None


def _difference(pairs: Sequence[tuple[Probe, Probe]], field: str) -> Any:
    """The `Estimate` of a field's paired differences; None where no pair has both values."""
    found = [(first - second, probe.unit) for probe, first, second in _both(pairs, field)]
    return bootstrap(*zip(*found, strict=True)) if found else None


def _both(pairs: Sequence[tuple[Probe, Probe]], field: str) -> list[tuple[Probe, float, float]]:
    """The first record of every pair in which both have a value, and the two values."""
    found = [(first, getattr(first, field), getattr(second, field)) for first, second in pairs]
    return [(probe, float(a), float(b)) for probe, a, b in found if a is not None and b is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _exponential(of: Estimate | None) -> Estimate | None:
    if of is None:
        return None
    return Estimate(value=math.exp(of.value), low=math.exp(of.low), high=math.exp(of.high), n=of.n)


def _order(donors: Donors, arm: str, thresholds: Thresholds) -> tuple[object, ...]:
    """Controls; then by donors: the unrotated arm, seams by length, the default policy, others by name."""
    if arm in CONTROLS:
        return -1, CONTROLS.index(arm), 0, ""
    rank = 0 if arm == "naive" else 1
    if donors is Donors.TRACE:
        rank = 0 if arm == thresholds.default_policy else 1
    # By the seam that a name says, so that seam-8 comes before seam-32.
    return list(Donors).index(donors), rank, seam_of(arm) if seam_of(arm) is not None else math.inf, arm
