"""EDITS: which prompts count, what they are grouped by, and what is recovered of the new answer.

Only prompts whose two full prefills differ count (`MIN_GAP`), and of which an arm splices anything; those whose answer
does not depend on the field stand apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from pic_bench.fidelity.record import Edit, Probe

GATED = "all"
UNAFFECTED = "answer does not depend on it"
_CLASSES = {2: "1 to 2", 8: "3 to 8", 32: "9 to 32"}
_GROUPS: dict[str, Callable[[Edit], object]] = {
    "distance": lambda edit: edit.distance,
    "tokens of the edit": lambda edit: _tokens(max(edit.old_tokens, edit.new_tokens)),
    "old and new value": lambda edit: "as long" if edit.old_tokens == edit.new_tokens else "of other lengths",
    "changed fields": lambda edit: edit.num_fields,
    "family": lambda edit: edit.family.value,
}
"""What prompts are grouped by, and the group of each."""
Unit = TypeVar("Unit")


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


def grouped(prompts: Mapping[Unit, Probe]) -> dict[str, set[Unit]]:
    """The prompts of every group: all that depend on their field, these by each of `_GROUPS`, and the others."""
    found: dict[tuple[str, str], set[Unit]] = defaultdict(set)
    for unit, probe in prompts.items():
        assert probe.edit is not None, "records of EDITS say what was edited"
        if not probe.edit.family.is_gated:
            found[UNAFFECTED, probe.edit.family.value].add(unit)
            continue
        found[GATED, ""].add(unit)
        for name, at in _GROUPS.items():
            found[name, str(at(probe.edit))].add(unit)
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


def _tokens(number: int) -> str:
    return next((name for limit, name in _CLASSES.items() if number <= limit), "33 or more")
