"""The figures of every arm on every choice of a trace's calls; intervals are over sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pic_bench.fidelity.arms import CONTROLS
from pic_bench.fidelity.record import Probe
from pic_bench.fidelity.summary import Cell, Contrast, Flips
from pic_bench.report.stats import bootstrap, ratio

FLOORS = ("exact", "retest")
"""The controls that show the differences with nothing spliced: the first that was measured is the floor."""
DEFAULT = "default"
"""The policy whose splices choose the calls that reuse much."""
DECIDED = 0.5
"""A call is decided if the full prefill gives its likeliest token at least this probability."""
COMPETENT = 0.3
"""A cell whose calls have a lower median of that probability is undecided."""
Pairs = Sequence[tuple[Probe, Probe]]

_MEANS = {name: name for name in ("kl", "cosine", "forced_kl", "forced_agreement")}
_MEANS["top1"] = "top1_agrees"
"""Fields of records whose means are figures of a cell, by the figure's name."""
_SUMS = ("prompt_tokens", "chunk_hit_tokens", "computed_tokens")
_ORDER = (*(arm.name for arm in CONTROLS), DEFAULT)


@dataclass(slots=True)
class Panel:
    """All arms on calls of one trace in one number format."""

    dtype: str
    source: str
    min_chunk_hit: int = 0
    arms: dict[str, dict[str, Probe]] = field(default_factory=lambda: defaultdict(dict))

    def pair(self, first: str, second: str) -> Pairs:
        """The records of two arms on the same prompts."""
        others = self.arms.get(second, {})
        return [(probe, others[prompt]) for prompt, probe in self.arms[first].items() if prompt in others]


def make_panels(probes: Iterable[Probe], min_chunk_hit: int) -> tuple[list[Panel], int]:
    """Group records; of several of one prompt and arm the last counts, and the number of the others is returned.

    A trace with a default policy is looked at twice: all its measured calls, and those that reuse much under it; once
    where no other calls were measured.
    """
    panels: dict[tuple[str, str], Panel] = {}
    repeated = 0
    for probe in probes:
        key = probe.dtype, probe.source
        arm = panels.setdefault(key, Panel(*key)).arms[probe.arm]
        repeated += probe.prompt in arm
        arm[probe.prompt] = probe
    ordered = sorted(panels, key=lambda key: (key[0] != "float32", *key))
    return [part for key in ordered for part in _parts(panels[key], min_chunk_hit)], repeated


def count_sure(probes: Iterable[Probe]) -> Flips | None:
    """The forced tokens of which the full prefill is sure; None where a record does not say how many."""
    flips = tokens = 0
    for probe in probes:
        if probe.sure_flips is None or probe.sure_tokens is None:
            return None
        flips, tokens = flips + probe.sure_flips, tokens + probe.sure_tokens
    return Flips(flips=flips, tokens=tokens) if tokens else None


def make_cells(panels: Sequence[Panel]) -> list[Cell]:
    """A cell for every arm of every panel: controls first, then the default policy."""
    return [_cell(panel, arm) for panel in panels for arm in sorted(panel.arms, key=_order)]


def _parts(panel: Panel, min_chunk_hit: int) -> list[Panel]:
    """The panel, and where these are others its calls that reuse much."""
    default = panel.arms.get(DEFAULT, {})
    kept = {prompt for prompt, probe in default.items() if probe.chunk_hit_tokens >= min_chunk_hit}
    arms = {name: {prompt: arm[prompt] for prompt in arm if prompt in kept} for name, arm in panel.arms.items()}
    reusing = Panel(panel.dtype, panel.source, min_chunk_hit, {name: arm for name, arm in arms.items() if arm})
    if not kept:
        return [panel]
    return [reusing] if reusing.arms == panel.arms else [panel, reusing]


def _cell(panel: Panel, arm: str) -> Cell:
    probes = list(panel.arms[arm].values())
    kls = [probe.kl for probe in probes]
    decided = [probe for probe in probes if probe.top1_probability >= DECIDED]
    floor = next((name for name in FLOORS if name in panel.arms), arm)
    return Cell(
        dtype=panel.dtype,
        source=panel.source,
        min_chunk_hit=panel.min_chunk_hit,
        arm=arm,
        n=len(probes),
        num_units=len({probe.unit for probe in probes}),
        **{name: _estimate((getattr(p, field), p.unit) for p in probes) for name, field in _MEANS.items()},
        sure=count_sure(probes),
        kl_median=float(np.median(kls)),
        kl_p95=float(np.percentile(kls, 95)),
        kl_max=max(kls),
        top1_decided=_estimate((p.top1_agrees, p.unit) for p in decided),
        undecided=float(np.median([p.top1_probability for p in probes])) < COMPETENT,
        nll_change=_difference(panel.pair(arm, "full"), "gold_nll"),
        **{name: sum(getattr(probe, name) for probe in probes) for name in _SUMS},
        against_floor=None if arm in (floor, "full") else _contrast(panel, arm, floor),
    )


def _contrast(panel: Panel, arm: str, baseline: str) -> Contrast | None:
    """`arm` less `baseline`, paired by prompt; None where they share no prompt."""
    pairs = panel.pair(arm, baseline)
    if not pairs:
        return None
    computed, of_baseline = (sum(pair[side].computed_tokens for pair in pairs) for side in (0, 1))
    return Contrast(
        baseline=baseline,
        n=len(pairs),
        unpaired=len(panel.arms[arm].keys() ^ panel.arms[baseline].keys()),
        kl=_difference(pairs, "kl"),
        top1=_difference(pairs, "top1_agrees"),
        computed_share=ratio(computed, of_baseline),
    )


def _estimate(values: Iterable[tuple[float | None, str]]) -> Any:
    """The `Estimate` of values with their units; None where no record has a value."""
    found = [(float(value), unit) for value, unit in values if value is not None]
    return bootstrap(*zip(*found, strict=True)) if found else None


def _difference(pairs: Pairs, field: str) -> Any:
    """The `Estimate` of a field's paired differences; None where no pair has both values."""
    found = [(probe, getattr(probe, field), getattr(other, field)) for probe, other in pairs]
    return _estimate((float(a) - float(b), probe.unit) for probe, a, b in found if a is not None and b is not None)


def _order(arm: str) -> tuple[int, str]:
    """Controls, the default policy, others by name."""
    return _ORDER.index(arm) if arm in _ORDER else len(_ORDER), arm
