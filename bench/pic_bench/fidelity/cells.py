"""Statistics of every cell: means, medians, shares and paired differences with bootstrap intervals.

Intervals are over prompts; over sessions where prompts are calls of a trace. Owns which records a figure is made of.
It must not know files, words or pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pic_bench.fidelity.panels import Panel, pair_arms, pair_values
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Contrast, Thresholds, seam_of
from pic_bench.report.stats import Estimate, Statistic, bootstrap, bootstrap_ratio

__all__ = ["computed_tokens", "contrast", "make_cells"]


def make_cells(panels: Sequence[Panel], thresholds: Thresholds) -> list[Cell]:
    """A cell for every arm of every panel: controls first, then by donors, unrotated, seam length and policy."""
    return [
        _cell(panel, donors, arm, thresholds)
        for panel in panels
        for donors, arm in sorted(panel.arms, key=lambda key: _order(key[0], key[1], thresholds))
    ]


def contrast(panel: Panel, donors: Donors, arm: str, baseline: str) -> Contrast | None:
    """`arm` less `baseline`, paired by prompt; None where they share no prompt."""
    pairs, unpaired = pair_arms(panel.arm(arm, donors), panel.arm(baseline, donors))
    if not pairs:
        return None
    units = [first.unit for first, _ in pairs]
    return Contrast(
        baseline=baseline,
        n=len(pairs),
        unpaired=unpaired,
        kl=bootstrap([a.kl - b.kl for a, b in pairs], units=units),
        top1=bootstrap([float(a.top1_agrees) - float(b.top1_agrees) for a, b in pairs], units=units),
        forced_kl=_difference(pairs, lambda probe: probe.forced_kl),
        computed_share=bootstrap_ratio(
            [computed_tokens(a) for a, _ in pairs],
            [computed_tokens(b) for _, b in pairs],
            units=units,
        ),
    )


def computed_tokens(probe: Probe) -> int:
    """Prompt tokens that the model prefilled."""
    return probe.prompt_tokens - probe.prefix_hit_tokens - probe.chunk_hit_tokens


def _cell(panel: Panel, donors: Donors, arm: str, thresholds: Thresholds) -> Cell:
    records = panel.arms[donors, arm]
    probes = list(records.values())
    with_full = pair_arms(records, panel.arm("full", donors)).pairs
    floor = panel.floor(donors)
    kls = [probe.kl for probe in probes]
    decided = [p for p in probes if p.top1_probability >= thresholds.decided_probability]
    probability = float(np.median([p.top1_probability for p in probes]))
    greedy = [p for p in probes if p.agreed_tokens is not None and p.greedy_tokens]
    full_nll = [full for _, _, full in pair_values(with_full, lambda probe: probe.gold_nll)]
    full_scores = [full for _, _, full in pair_values(with_full, lambda probe: probe.score)]
    return Cell(
        experiment=panel.experiment,
        dtype=panel.dtype,
        source=panel.source,
        num_blocks=panel.num_blocks,
        donors=donors,
        shift=panel.shift,
        arm=arm,
        min_chunk_hit=panel.min_chunk_hit,
        n=len(probes),
        num_units=len({probe.unit for probe in probes}),
        kl=_always(probes, lambda p: p.kl),
        kl_median=_always(probes, lambda p: p.kl, Statistic.MEDIAN),
        kl_p95=float(np.percentile(kls, 95)),
        kl_max=max(kls),
        cosine=_always(probes, lambda p: p.cosine),
        top1=_always(probes, lambda p: float(p.top1_agrees)),
        top1_decided=_maybe(decided, lambda p: float(p.top1_agrees)),
        top1_probability=probability,
        undecided=probability < thresholds.competent_probability,
        forced_kl=_maybe(probes, lambda p: p.forced_kl),
        perplexity=_exponential(_maybe(probes, lambda p: p.gold_nll)),
        full_perplexity=math.exp(sum(full_nll) / len(full_nll)) if full_nll else None,
        perplexity_ratio=_exponential(_difference(with_full, lambda p: p.gold_nll)),
        agreed_tokens=_maybe(greedy, lambda p: p.agreed_tokens, Statistic.MEDIAN),
        agrees_to_end=_maybe(greedy, lambda p: float((p.agreed_tokens or 0) >= p.greedy_tokens)),
        score=_maybe(probes, lambda p: p.score),
        exact_match=_maybe(probes, lambda p: None if p.exact_match is None else float(p.exact_match)),
        full_score=sum(full_scores) / len(full_scores) if full_scores else None,
        score_change=_difference(with_full, lambda probe: probe.score),
        incompetent=_is_incompetent(panel, donors, thresholds),
        key_error=_maybe(probes, lambda p: p.key_error),
        prompt_tokens=sum(p.prompt_tokens for p in probes),
        prefix_hit_tokens=sum(p.prefix_hit_tokens for p in probes),
        chunk_hit_tokens=sum(p.chunk_hit_tokens for p in probes),
        computed_tokens=sum(computed_tokens(p) for p in probes),
        against_floor=None if floor in (None, arm) or arm == "full" else contrast(panel, donors, arm, str(floor)),
    )


def _is_incompetent(panel: Panel, donors: Donors, thresholds: Thresholds) -> bool:
    """Whether the full prefill's mean score is too low; unknown counts as too low, no questions at all do not."""
    if panel.experiment is not Experiment.QA:
        return False
    scores = [probe.score for probe in panel.arm("full", donors).values() if probe.score is not None]
    return not scores or sum(scores) / len(scores) < thresholds.competent_score


def _difference(pairs: Sequence[tuple[Probe, Probe]], value: Callable[[Probe], float | None]) -> Estimate | None:
    found = [(a - b, probe.unit) for probe, a, b in pair_values(pairs, value)]
    return _bootstrap(found) if found else None


def _maybe(
    probes: Sequence[Probe], value: Callable[[Probe], float | None], statistic: Statistic = Statistic.MEAN
) -> Estimate | None:
    """Over the records that have the value; None where none has."""
    found = [(number, probe.unit) for probe in probes if (number := value(probe)) is not None]
    return _bootstrap(found, statistic) if found else None


def _always(
    probes: Sequence[Probe], value: Callable[[Probe], float], statistic: Statistic = Statistic.MEAN
) -> Estimate:
    return _bootstrap([(value(probe), probe.unit) for probe in probes], statistic)


def _bootstrap(found: Sequence[tuple[float, str]], statistic: Statistic = Statistic.MEAN) -> Estimate:
    return bootstrap([value for value, _ in found], statistic, units=[unit for _, unit in found])


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
