"""Figures of EDITS: how much of the way from the old prompt's answer to the new one's a policy goes, and its cost.

Only prompts whose two full prefills differ count (`MIN_GAP`), and of which an arm splices anything; those whose answer
does not depend on the field stand apart. Intervals draw templates: the prompts of one template resemble each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.record import MIN_GAP, Edit, Experiment, Probe
from pic_bench.fidelity.summary import EditCase, EditCell
from pic_bench.report.stats import bootstrap, ratio

GATED = "all"
UNAFFECTED = "answer does not depend on it"
_CLASSES = {2: "1 to 2", 8: "3 to 8", 32: "9 to 32"}
GROUPS: dict[str, Callable[[Edit], str]] = {
    GATED: lambda _: "all",
    "distance": lambda edit: f"{edit.distance}",
    "tokens of the edit": lambda edit: _tokens(max(edit.old_tokens, edit.new_tokens)),
    "old and new value": lambda edit: "as long" if edit.old_tokens == edit.new_tokens else "of other lengths",
    "changed fields": lambda edit: f"{edit.num_fields}",
    "family": lambda edit: edit.family.value,
}
"""What prompts are grouped by, and the group of each."""


@dataclass(frozen=True, slots=True)
class _Arm:
    """One prompt under one arm, beside the controls of the same prompt."""

    probe: Probe
    recovery: float | None
    in_place: Probe | None


def split_edits(probes: Sequence[Probe]) -> tuple[list[Probe], list[Probe]]:
    """The records of the other experiments, and those of EDITS."""
    return [p for p in probes if p.edit is None], [p for p in probes if p.experiment is Experiment.EDITS and p.edit]


class Gated(NamedTuple):
    """The records that count, and how many prompts do not."""

    kept: list[Probe]
    alike: int
    """Prompts whose full prefills differ too little for anything to be recovered."""
    computed: int
    """Prompts of which no arm splices anything: they say nothing about splicing."""


def gate(probes: Sequence[Probe]) -> Gated:
    """Choose the prompts that say something about the arms."""
    kept: list[Probe] = []
    alike = computed = 0
    for arms in _prompts(probes):
        gap = _gap(arms)
        if gap is not None and gap < MIN_GAP:
            alike += 1
        elif not any(probe.chunk_hit_tokens for probe in arms.values()):
            computed += 1
        else:
            kept += arms.values()
    return Gated(kept, alike, computed)


def make_edit_cells(probes: Sequence[Probe]) -> list[EditCell]:
    """A cell for every number format, group and arm."""
    found: dict[tuple[str, str, str, str], list[_Arm]] = defaultdict(list)
    for arms in _prompts(gate(probes).kept):
        for probe in arms.values():
            edit = probe.edit
            assert edit is not None, "records of EDITS say what was edited"
            arm = _Arm(probe, _recovery(arms, probe), arms.get("in_place"))
            groups = GROUPS if edit.family.is_gated else {UNAFFECTED: GROUPS["family"]}
            for group, at in groups.items():
                found[probe.dtype, group, at(edit), probe.arm].append(arm)
    return [_cell(key, arms) for key, arms in sorted(found.items(), key=lambda item: _order(item[0]))]


def make_edit_cases(probes: Sequence[Probe]) -> list[EditCase]:
    """Every measured prompt with its recoveries."""
    cases = []
    for arms in _prompts(gate(probes).kept):
        full = arms["full"]
        assert full.edit is not None, "records of EDITS say what was edited"
        spliced = {name: probe for name, probe in arms.items() if name not in ("full", "stale")}
        recovery = {name: found for name, probe in spliced.items() if (found := _recovery(arms, probe)) is not None}
        kl = {name: probe.kl for name, probe in spliced.items()}
        one = EditCase(dtype=full.dtype, prompt=full.prompt, edit=full.edit, gap=_gap(arms), recovery=recovery, kl=kl)
        cases.append(one)
    return cases


def _prompts(probes: Sequence[Probe]) -> Iterator[dict[str, Probe]]:
    """The records of every prompt and number format by arm; without its full prefills a prompt is left out."""
    found: dict[tuple[str, str], dict[str, Probe]] = defaultdict(dict)
    for probe in probes:
        found[probe.dtype, probe.prompt][probe.arm] = probe
    return (arms for arms in found.values() if {"full", "stale"} <= arms.keys())


def _gap(arms: dict[str, Probe]) -> float | None:
    new, old = arms["full"].log_odds, arms["stale"].log_odds
    return None if new is None or old is None else new - old


def _recovery(arms: dict[str, Probe], probe: Probe) -> float | None:
    gap, old = _gap(arms), arms["stale"].log_odds
    return None if gap is None or old is None or probe.log_odds is None else (probe.log_odds - old) / gap


def _cell(key: tuple[str, str, str, str], arms: Sequence[_Arm]) -> EditCell:
    probes = [arm.probe for arm in arms]
    units = [probe.unit for probe in probes]
    recoveries = [arm.recovery for arm in arms if arm.recovery is not None]
    both = [(arm.probe, arm.in_place) for arm in arms if arm.in_place is not None]
    prompt_tokens = sum(probe.prompt_tokens for probe in probes)
    dtype, group, at, arm = key
    return EditCell(
        dtype=dtype,
        group=group,
        at=at,
        arm=arm,
        n=len(arms),
        num_templates=len(set(units)),
        recovery=bootstrap(recoveries, units) if recoveries else None,
        recovery_median=float(np.median(recoveries)) if recoveries else None,
        recovery_p10=float(np.percentile(recoveries, 10)) if recoveries else None,
        kl=bootstrap([probe.kl for probe in probes], units),
        kl_max=max(probe.kl for probe in probes),
        computed_share=sum(probe.computed_tokens for probe in probes) / prompt_tokens,
        spliced_share=sum(probe.chunk_hit_tokens for probe in probes) / prompt_tokens,
        spliced_of_in_place=ratio(sum(a.chunk_hit_tokens for a, _ in both), sum(b.chunk_hit_tokens for _, b in both)),
    )


def _tokens(number: int) -> str:
    return next((name for limit, name in _CLASSES.items() if number <= limit), "33 or more")


def _order(key: tuple[str, str, str, str]) -> tuple[object, ...]:
    """float32 first, groups as they are declared, numbers by their value, arms as they were measured."""
    dtype, group, at, _ = key
    first = at.split()[0]
    groups = [*GROUPS, UNAFFECTED]
    return dtype != "float32", dtype, groups.index(group), int(first) if first.isdigit() else 0, at
