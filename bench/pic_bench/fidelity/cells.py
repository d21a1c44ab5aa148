"""Statistics of every cell: means, medians, shares and paired differences with bootstrap intervals over prompts.

Owns which records a figure is made of. It must not know files, words or pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pic_bench.fidelity.panels import Panel, pair_arms, pair_values
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Contrast, Limits, seam_of
from pic_bench.stats import Estimate, Statistic, bootstrap, bootstrap_ratio

__all__ = ["computed_tokens", "contrast", "make_cells"]


def make_cells(panels: Sequence[Panel], limits: Limits) -> list[Cell]:
    """A cell for every arm of every panel: controls first, then by donors, unrotated, seam length and policy."""
    return [
        _cell(panel, donors, arm, limits)
        for panel in panels
        for donors, arm in sorted(panel.arms, key=lambda key: _order(key[0], key[1], limits))
    ]


def contrast(panel: Panel, donors: Donors, arm: str, baseline: str) -> Contrast | None:
    """`arm` less `baseline`, paired by prompt; None where they share no prompt."""
    pairs, unpaired = pair_arms(panel.arm(arm, donors), panel.arm(baseline, donors))
    if not pairs:
        return None
    return Contrast(
        baseline=baseline,
        n=len(pairs),
        unpaired=unpaired,
        kl=bootstrap([a.kl - b.kl for a, b in pairs]),
        top1=bootstrap([float(a.top1_agrees) - float(b.top1_agrees) for a, b in pairs]),
        forced_kl=_difference(pairs, lambda probe: probe.forced_kl),
        computed_share=bootstrap_ratio(
            [computed_tokens(a) for a, _ in pairs],
            [computed_tokens(b) for _, b in pairs],
        ),
    )


def computed_tokens(probe: Probe) -> int:
    """Prompt tokens that the model prefilled."""
    return probe.prompt_tokens - probe.prefix_hit_tokens - probe.chunk_hit_tokens


def _cell(panel: Panel, donors: Donors, arm: str, limits: Limits) -> Cell:
    records = panel.arms[donors, arm]
    probes = list(records.values())
    with_full = pair_arms(records, panel.arm("full", donors)).pairs
    floor = panel.floor(donors)
    kls = [probe.kl for probe in probes]
    decided = [p for p in probes if p.top1_probability >= limits.decided_probability]
    probability = float(np.median([p.top1_probability for p in probes]))
    greedy = [(p.agreed_tokens, p.greedy_tokens) for p in probes if p.agreed_tokens is not None and p.greedy_tokens]
    nll, full_nll = pair_values(with_full, lambda probe: probe.gold_nll)
    _, full_scores = pair_values(with_full, lambda probe: probe.score)
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
        kl=bootstrap(kls),
        kl_median=bootstrap(kls, Statistic.MEDIAN),
        kl_p95=float(np.percentile(kls, 95)),
        kl_max=max(kls),
        cosine=bootstrap([p.cosine for p in probes]),
        top1=bootstrap([float(p.top1_agrees) for p in probes]),
        top1_decided=_maybe([float(p.top1_agrees) for p in decided]),
        top1_probability=probability,
        undecided=probability < limits.competent_probability,
        forced_kl=_maybe([p.forced_kl for p in probes if p.forced_kl is not None]),
        perplexity=_exponential(_maybe([p.gold_nll for p in probes if p.gold_nll is not None])),
        full_perplexity=math.exp(sum(full_nll) / len(full_nll)) if full_nll else None,
        perplexity_ratio=_exponential(_maybe([a - b for a, b in zip(nll, full_nll, strict=True)])),
        agreed_tokens=_maybe([float(agreed) for agreed, _ in greedy], Statistic.MEDIAN),
        agrees_to_end=_maybe([float(agreed >= generated) for agreed, generated in greedy]),
        score=_maybe([p.score for p in probes if p.score is not None]),
        exact_match=_maybe([float(p.exact_match) for p in probes if p.exact_match is not None]),
        full_score=sum(full_scores) / len(full_scores) if full_scores else None,
        score_change=_difference(with_full, lambda probe: probe.score),
        incompetent=_is_incompetent(panel, donors, limits),
        key_error=_maybe([p.key_error for p in probes if p.key_error is not None]),
        prompt_tokens=sum(p.prompt_tokens for p in probes),
        prefix_hit_tokens=sum(p.prefix_hit_tokens for p in probes),
        chunk_hit_tokens=sum(p.chunk_hit_tokens for p in probes),
        computed_tokens=sum(computed_tokens(p) for p in probes),
        against_floor=None if floor in (None, arm) or arm == "full" else contrast(panel, donors, arm, str(floor)),
    )


def _is_incompetent(panel: Panel, donors: Donors, limits: Limits) -> bool:
    """Whether the full prefill's mean score is too low; unknown counts as too low, no questions at all do not."""
    if panel.experiment is not Experiment.QA:
        return False
    scores = [probe.score for probe in panel.arm("full", donors).values() if probe.score is not None]
    return not scores or sum(scores) / len(scores) < limits.competent_score


def _difference(pairs: Sequence[tuple[Probe, Probe]], value: Callable[[Probe], float | None]) -> Estimate | None:
    first, second = pair_values(pairs, value)
    return _maybe([a - b for a, b in zip(first, second, strict=True)])


def _maybe(values: Sequence[float], statistic: Statistic = Statistic.MEAN) -> Estimate | None:
    return bootstrap(values, statistic) if values else None


def _exponential(of: Estimate | None) -> Estimate | None:
    if of is None:
        return None
    return Estimate(value=math.exp(of.value), low=math.exp(of.low), high=math.exp(of.high), n=of.n)


def _order(donors: Donors, arm: str, limits: Limits) -> tuple[object, ...]:
    """Controls; then by donors: the unrotated arm, seams by length, the default policy, others by name."""
    if arm in CONTROLS:
        return -1, CONTROLS.index(arm), 0, ""
    rank = 0 if arm == "naive" else 1
    if donors is Donors.TRACE:
        rank = 0 if arm == limits.default_policy else 1
    # By the seam that a name says, so that seam-8 comes before seam-32.
    return list(Donors).index(donors), rank, seam_of(arm) if seam_of(arm) is not None else math.inf, arm
