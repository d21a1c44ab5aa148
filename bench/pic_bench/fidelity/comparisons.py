"""Pairs of arms that say what a setting changes: KL of the same prompts under both, pooled over an experiment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pic_bench.fidelity.panels import Panel, pair_arms
from pic_bench.fidelity.record import Donors, Experiment, Probe
from pic_bench.fidelity.summary import Comparison, seam_of
from pic_bench.report.stats import bootstrap

SPLICED = {Donors.ISOLATED: "alone", Donors.CONTEXT: "in context"}
FLOORS = {"exact": "exact hit", "retest": "full prefill again"}
Pairs = Sequence[tuple[Probe, Probe]]


def make_comparisons(panels: Sequence[Panel]) -> list[Comparison]:
    """All comparisons of the grid and of shifts that the records allow, those of one kind side by side."""
    found: list[Comparison] = []
    for experiment in (Experiment.GRID, Experiment.SHIFT):
        of = [panel for panel in panels if panel.experiment is experiment]
        for dtype in dict.fromkeys(panel.dtype for panel in of):
            some = [panel for panel in of if panel.dtype == dtype]
            where = f"{dtype}, {experiment.value}"
            for donors, words in SPLICED.items():
                found += [_compared(what, f"{where}, {words}", pairs) for what, pairs in _pairs(some, donors)]
            apart = [pair for p in some for pair in pair_arms(*(p.arm("seam-1", d) for d in SPLICED)).pairs]
            if apart:
                found.append(_compared("donors alone less in context, seam 1", where, apart))
    order = list(dict.fromkeys(one.what for one in found))
    return sorted(found, key=lambda one: order.index(one.what))


def _pairs(panels: Sequence[Panel], donors: Donors) -> Iterator[tuple[str, Pairs]]:
    longest = max((seam for p in panels for d, arm in p.arms if d is donors and (seam := seam_of(arm))), default=0)
    floor = next((name for p in panels if (name := p.floor(donors))), None)
    compared = [
        ("not rotated less rotated, seam 1", "naive", "seam-1"),
        ("seam 0 less seam 1", "seam-0", "seam-1"),
    ]
    if longest > 1:
        compared.append((f"seam 1 less seam {longest}", "seam-1", f"seam-{longest}"))
    if floor is not None:
        compared.append((f"seam 1 less {FLOORS[floor]}", "seam-1", floor))
    for what, first, second in compared:
        pairs = [pair for p in panels for pair in pair_arms(p.arm(first, donors), p.arm(second, donors)).pairs]
        if pairs:
            yield what, pairs


def _compared(what: str, where: str, pairs: Pairs) -> Comparison:
    by_prompt: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for first, second in pairs:
        by_prompt[first.source, first.unit, first.prompt].append((first.kl, second.kl))
    units = [(source, unit) for source, unit, _ in by_prompt]
    means = np.array([np.mean(kls, axis=0) for kls in by_prompt.values()])
    differences = means[:, 0] - means[:, 1]
    return Comparison(
        what=what,
        where=where,
        n=len(means),
        num_units=len(set(units)),
        first=float(means[:, 0].mean()),
        second=float(means[:, 1].mean()),
        difference=bootstrap(differences.tolist(), units=units),
        higher=float(np.mean(differences > 0)),
    )
