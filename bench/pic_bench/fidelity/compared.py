"""Pairs of arms at one place of an experiment, prompt by prompt, and the figures of each pair.

Intervals are over prompts; over sessions where prompts are calls of a trace. Of EDITS only prompts whose two full
prefills differ count (`MIN_GAP`), and of which an arm splices anything; those whose answer does not depend on the field
stand apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pic_bench.fidelity.record import Donors, Edit, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Contrast, Flips, Thresholds
from pic_bench.report.stats import bootstrap, ratio

FLOORS = {"exact": "exact hit", "retest": "full prefill again"}
"""The controls that show the differences with nothing spliced: the first that was measured is the floor."""
Arm = dict[str, Probe]
"""By prompt."""
Pairs = Sequence[tuple[Probe, Probe]]

_PLACE = ("experiment", "dtype", "source", "group", "min_chunk_hit")
_MEANS = {name: name for name in ("kl", "cosine", "forced_kl", "forced_agreement")}
_MEANS["top1"] = "top1_agrees"
"""Fields of records whose means are figures of a cell, by the figure's name."""
_SUMS = ("prompt_tokens", "chunk_hit_tokens", "computed_tokens")
GATED = "all"
UNAFFECTED = "answer does not depend on it"
_CLASSES = {2: "1 to 2", 8: "3 to 8", 32: "9 to 32"}
_GROUPS: dict[str, Callable[[Edit], object]] = {
    "distance": lambda edit: edit.distance,
    "tokens of the edit": lambda edit: next(
        (name for most, name in _CLASSES.items() if max(edit.old_tokens, edit.new_tokens) <= most), "33 or more"
    ),
    "old and new value": lambda edit: "as long" if edit.old_tokens == edit.new_tokens else "of other lengths",
    "changed fields": lambda edit: edit.num_fields,
    "family": lambda edit: edit.family.value,
}
"""The key by which prompts are grouped, and the group of each."""


@dataclass(slots=True)
class Panel:
    """All arms at one place of an experiment."""

    experiment: Experiment
    dtype: str
    source: str
    group: str = ""
    min_chunk_hit: int = 0
    arms: dict[tuple[Donors, str], Arm] = field(default_factory=lambda: defaultdict(dict))

    def arm(self, name: str, donors: Donors) -> Arm:
        """The records of an arm with these donors; a control's whatever the donors; empty where there are none."""
        found = self.arms.get((donors, name))
        if found is None and name in CONTROLS:
            found = next((arm for (_, other), arm in self.arms.items() if other == name), None)
        return found or {}

    def pair(self, first: str, second: str, donors: Donors) -> Pairs:
        """The records of two arms on the same prompts."""
        return pair_arms(self.arm(first, donors), self.arm(second, donors))

    def floor(self, donors: Donors) -> str | None:
        """The control that shows the differences with nothing spliced; None if none was measured."""
        return next((name for name in FLOORS if self.arm(name, donors)), None)

    def part(self, prompts: Set[str], *, group: str = "", min_chunk_hit: int = 0) -> Panel:
        """The same arms on these prompts only; no arm that measured none of them."""
        kept = {
            key: {prompt: probe for prompt, probe in arm.items() if prompt in prompts} for key, arm in self.arms.items()
        }
        arms = {key: arm for key, arm in kept.items() if arm}
        return replace(self, group=group, min_chunk_hit=min_chunk_hit, arms=arms)


def make_panels(probes: Iterable[Probe], thresholds: Thresholds) -> tuple[list[Panel], int]:
    """Group records; of several of one prompt and arm the last counts, and the number of the others is returned.

    A trace with a default policy is looked at twice: all its calls, and those that reuse much under it; once where no
    other calls were measured. Prompts of EDITS are looked at by groups.
    """
    panels: dict[tuple[Experiment, str, str], Panel] = {}
    repeated = 0
    for probe in probes:
        key = (probe.experiment, probe.dtype, probe.source)
        arm = panels.setdefault(key, Panel(*key)).arms[probe.donors, probe.arm]
        repeated += probe.prompt in arm
        arm[probe.prompt] = probe
    # As experiments are declared, float32 before bfloat16, then by data.
    order = list(Experiment)
    ordered = sorted(panels, key=lambda key: (order.index(key[0]), key[1] != "float32", *key[1:]))
    return [part for key in ordered for part in _parts(panels[key], thresholds)], repeated


def pair_arms(first: Mapping[str, Probe], second: Mapping[str, Probe]) -> Pairs:
    """Pair two arms by prompt."""
    return [(probe, second[prompt]) for prompt, probe in first.items() if prompt in second]


def count_sure(probes: Iterable[Probe]) -> Flips | None:
    """The forced tokens of which the full prefill is sure; None where a record does not say how many."""
    flips = tokens = 0
    for probe in probes:
        if probe.sure_flips is None or probe.sure_tokens is None:
            return None
        flips, tokens = flips + probe.sure_flips, tokens + probe.sure_tokens
    return Flips(flips=flips, tokens=tokens) if tokens else None


def make_cells(panels: Sequence[Panel], thresholds: Thresholds) -> list[Cell]:
    """A cell for every arm of every panel: controls first, then by donors and policy."""
    return [
        _cell(panel, donors, arm, thresholds)
        for panel in panels
        for donors, arm in sorted(panel.arms, key=lambda key: _order_of_arms(key[0], key[1], thresholds))
    ]


class Gated(NamedTuple):
    """The records of the prompts that count, and how many prompts do not."""

    kept: list[Probe]
    alike: int
    """Prompts whose full prefills differ too little for anything to be recovered."""
    computed: int
    """Prompts of which no arm splices anything: they say nothing about splicing."""


def gate(probes: Iterable[Probe]) -> Gated:
    """Choose the prompts that say something about the arms; without its full prefills a prompt is left out."""
    found: dict[tuple[str, str], dict[str, Probe]] = defaultdict(dict)
    for probe in probes:
        found[probe.dtype, probe.prompt][probe.arm] = probe
    kept: list[Probe] = []
    alike = computed = 0
    for arms in (arms for arms in found.values() if {"full", "stale"} <= arms.keys()):
        if arms["full"].uses_no_field(arms["stale"]):
            alike += 1
        elif not any(probe.chunk_hit_tokens for probe in arms.values()):
            computed += 1
        else:
            kept += arms.values()
    return Gated(kept, alike, computed)


def grouped(prompts: Mapping[str, Probe]) -> dict[str, set[str]]:
    """The prompts of every group: all that depend on their field, these by each of `_GROUPS`, and the others."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for prompt, probe in prompts.items():
        assert probe.edit is not None, "records of EDITS say what was edited"
        if not probe.edit.family.is_gated:
            found[UNAFFECTED, probe.edit.family.value].add(prompt)
            continue
        found[GATED, ""].add(prompt)
        for name, at in _GROUPS.items():
            found[name, str(at(probe.edit))].add(prompt)
    return {f"{name}: {at}" if at else name: found[name, at] for name, at in sorted(found, key=_order)}


def recovered(probe: Probe, full: Probe, stale: Probe) -> float | None:
    """Of the way from the old prompt's answer to the new one's, the share that a record has gone."""
    if probe.log_odds is None or full.log_odds is None or stale.log_odds is None:
        return None
    return (probe.log_odds - stale.log_odds) / (full.log_odds - stale.log_odds)


def _order(group: tuple[str, str]) -> tuple[int, int, str]:
    """Groups as they are declared, numbers by their value."""
    name, at = group
    number = at.partition(" ")[0]
    return [GATED, *_GROUPS, UNAFFECTED].index(name), int(number) if number.isdigit() else 0, at


def _parts(panel: Panel, thresholds: Thresholds) -> list[Panel]:
    """The panel, or the groups of its prompts that are looked at."""
    if panel.experiment is Experiment.EDITS:
        return [panel.part(some, group=group) for group, some in grouped(panel.arm("full", Donors.NONE)).items()]
    default = next((arm for (_, name), arm in panel.arms.items() if name == thresholds.default_policy), {})
    kept = {prompt for prompt, probe in default.items() if probe.chunk_hit_tokens >= thresholds.min_chunk_hit}
    if not kept:
        return [panel]
    reusing = panel.part(kept, min_chunk_hit=thresholds.min_chunk_hit)
    return [reusing] if reusing.arms == panel.arms else [panel, reusing]


def _cell(panel: Panel, donors: Donors, arm: str, thresholds: Thresholds) -> Cell:
    probes = list(panel.arms[donors, arm].values())
    with_full = panel.pair(arm, "full", donors)
    floor = panel.floor(donors)
    kls = [probe.kl for probe in probes]
    decided = [p for p in probes if p.top1_probability >= thresholds.decided_probability]
    probability = float(np.median([p.top1_probability for p in probes]))
    recoveries = _recoveries(panel, donors, arm)
    shares = [share for share, _ in recoveries]
    return Cell(
        **{name: getattr(panel, name) for name in _PLACE},
        donors=donors,
        arm=arm,
        n=len(probes),
        num_units=len({probe.unit for probe in probes}),
        **{name: _estimate((getattr(p, field), p.unit) for p in probes) for name, field in _MEANS.items()},
        sure=count_sure(probes),
        kl_median=float(np.median(kls)),
        kl_p95=float(np.percentile(kls, 95)),
        kl_max=max(kls),
        top1_decided=_estimate((p.top1_agrees, p.unit) for p in decided),
        undecided=probability < thresholds.competent_probability,
        nll_change=_difference(with_full, "gold_nll"),
        recovery=_estimate(recoveries),
        recovery_median=float(np.median(shares)) if shares else None,
        recovery_p10=float(np.percentile(shares, 10)) if shares else None,
        **{name: sum(getattr(probe, name) for probe in probes) for name in _SUMS},
        spliced_of_in_place=_ratio_of_sums(panel.pair(arm, "in_place", donors), "chunk_hit_tokens"),
        against_floor=None if floor in (None, arm) or arm == "full" else _contrast(panel, donors, arm, str(floor)),
    )


def _recoveries(panel: Panel, donors: Donors, arm: str) -> list[tuple[float, str]]:
    """What an arm of EDITS recovers of each prompt, with the prompt's unit; nothing in other experiments."""
    full, stale = panel.arm("full", donors), panel.arm("stale", Donors.EDITED)
    both = [(probe, full[name], stale[name]) for name, probe in panel.arms[donors, arm].items() if name in stale]
    return [(share, probe.unit) for probe, new, old in both if (share := recovered(probe, new, old)) is not None]


def _contrast(panel: Panel, donors: Donors, arm: str, baseline: str) -> Contrast | None:
    """`arm` less `baseline`, paired by prompt; None where they share no prompt."""
    pairs = panel.pair(arm, baseline, donors)
    if not pairs:
        return None
    return Contrast(
        baseline=baseline,
        n=len(pairs),
        unpaired=len(panel.arm(arm, donors).keys() ^ panel.arm(baseline, donors).keys()),
        kl=_difference(pairs, "kl"),
        top1=_difference(pairs, "top1_agrees"),
        computed_share=_ratio_of_sums(pairs, "computed_tokens"),
    )


def _estimate(values: Iterable[tuple[float | None, str]]) -> Any:
    """The `Estimate` of values with their units; None where no record has a value."""
    found = [(float(value), unit) for value, unit in values if value is not None]
    return bootstrap(*zip(*found, strict=True)) if found else None


def _difference(pairs: Pairs, field: str) -> Any:
    """The `Estimate` of a field's paired differences; None where no pair has both values."""
    return _estimate((first - second, probe.unit) for probe, first, second in _both(pairs, field))


def _both(pairs: Pairs, field: str) -> list[tuple[Probe, float, float]]:
    """The first record of every pair in which both have a value, and the two values."""
    found = [(first, getattr(first, field), getattr(second, field)) for first, second in pairs]
    return [(probe, float(a), float(b)) for probe, a, b in found if a is not None and b is not None]


def _ratio_of_sums(pairs: Pairs, field: str) -> float | None:
    first, second = (sum(getattr(pair[side], field) for pair in pairs) for side in (0, 1))
    return ratio(first, second)


def _order_of_arms(donors: Donors, arm: str, thresholds: Thresholds) -> tuple[object, ...]:
    """Controls; then by donors: the unrotated arm or the default policy, others by name."""
    if arm in CONTROLS:
        return -1, CONTROLS.index(arm), ""
    rank = 0 if arm == "naive" else 1
    if donors is Donors.TRACE:
        rank = 0 if arm == thresholds.default_policy else 1
    return list(Donors).index(donors), rank, arm
