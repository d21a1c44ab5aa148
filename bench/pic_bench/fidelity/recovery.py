"""EDITS: how much of the way from the old prompt's answer to the new one's a policy recovers, and what it costs.

Only prompts whose two full prefills differ count (`MIN_GAP`), and of which an arm splices anything; those whose answer
does not depend on the field stand apart. Intervals draw templates: the prompts of one template resemble each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pic_bench.fidelity.pictures import RECOVERY, Curve, Picture, plot, slug
from pic_bench.fidelity.record import Edit, Probe
from pic_bench.fidelity.summary import EditCase, EditCell
from pic_bench.fidelity.tables import Titled, arm_name, optional
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, share, with_interval
from pic_bench.report.stats import bootstrap, ratio

GATED = "all"
UNAFFECTED = "answer does not depend on it"
NUM_WORST = 12
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

Arms = dict[str, Probe]
"""The records of one prompt in one number format, by arm."""


class Gated(NamedTuple):
    """The prompts that count, and how many do not."""

    kept: list[Arms]
    alike: int
    """Prompts whose full prefills differ too little for anything to be recovered."""
    computed: int
    """Prompts of which no arm splices anything: they say nothing about splicing."""


def gate(probes: Sequence[Probe]) -> Gated:
    """Choose the prompts that say something about the arms; without its full prefills a prompt is left out."""
    found: dict[tuple[str, str], Arms] = defaultdict(dict)
    for probe in probes:
        found[probe.dtype, probe.prompt][probe.arm] = probe
    kept: list[Arms] = []
    alike = computed = 0
    for arms in (arms for arms in found.values() if {"full", "stale"} <= arms.keys()):
        if arms["full"].uses_no_field(arms["stale"]):
            alike += 1
        elif not any(probe.chunk_hit_tokens for probe in arms.values()):
            computed += 1
        else:
            kept.append(arms)
    return Gated(kept, alike, computed)


def make_edit_cells(gated: Gated) -> list[EditCell]:
    """A cell for every number format, group and arm."""
    found: dict[tuple[str, str, str, str], list[Arms]] = defaultdict(list)
    for arms in gated.kept:
        edit = _edit(arms)
        groups = GROUPS if edit.family.is_gated else {UNAFFECTED: GROUPS["family"]}
        for name, probe in arms.items():
            for group, at in groups.items():
                found[probe.dtype, group, at(edit), name].append(arms)
    return [_cell(*key, prompts) for key, prompts in sorted(found.items(), key=lambda item: _order(*item[0]))]


def make_edit_cases(gated: Gated) -> list[EditCase]:
    """Every measured prompt with its recoveries."""
    cases = []
    for arms in gated.kept:
        names = [name for name in arms if name not in ("full", "stale")]
        recovery = {name: found for name in names if (found := _recovery(arms, name)) is not None}
        kl = {name: arms[name].kl for name in names}
        full, gap = arms["full"], _gap(arms)
        cases.append(
            EditCase(dtype=full.dtype, prompt=full.prompt, edit=_edit(arms), gap=gap, recovery=recovery, kl=kl)
        )
    return cases


def shown(cells: Sequence[EditCell], cases: Sequence[EditCase]) -> Iterator[Titled | Picture]:
    """The tables and pictures of EDITS."""
    for group, which in ((GATED, "depends on the field"), (UNAFFECTED, "does not depend on it")):
        if any(cell.group == group for cell in cells):
            yield Titled(f"Prompts whose answer {which}", edit_table(cells, group))
    for dtype in dict.fromkeys(cell.dtype for cell in cells if cell.group == GATED):
        some = [cell for cell in cells if cell.dtype == dtype and cell.group != UNAFFECTED]
        yield _by_cost([cell for cell in some if cell.group == GATED])
        for what, write in _FIGURES.items():
            yield Titled(f"{what}: {dtype}", _groups_table(some, write), folded=write is not _mean_and_p10)
        of = [case for case in cases if case.dtype == dtype]
        for arm in dict.fromkeys(arm for case in of for arm in case.recovery if arm != "recompile"):
            yield Titled(f"Least recovered under {arm}: {dtype}", _cases_table(of, arm), folded=arm != "notes")


def edit_table(cells: Sequence[EditCell], group: str) -> Table:
    """What each arm recovers and what it costs, on the prompts of one way of grouping."""
    some = [cell for cell in cells if cell.group == group]
    header = ["policy", "n", "templates", "recovery, mean", "median", "10th percentile", "KL mean", "max"]
    header += ["computed", "spliced", "of in place's"]
    rows = []
    for cell in some:
        where = [cell.dtype, "" if cell.at == "all" else cell.at, arm_name(cell.arm)]
        row = [", ".join(filter(None, where)), f"{cell.n:,}", f"{cell.num_templates}"]
        row += [with_interval(cell.recovery, _two), _maybe_two(cell.recovery_median), _maybe_two(cell.recovery_p10)]
        row += [with_interval(cell.kl, divergence), divergence(cell.kl_max)]
        row += [share(cell.computed_share), share(cell.spliced_share), optional(cell.spliced_of_in_place, share)]
        rows.append(row)
    if all(cell.recovery is None for cell in some):
        header, rows = header[:3] + header[6:], [row[:3] + row[6:] for row in rows]
    return Table(header, rows)


def _groups_table(cells: Sequence[EditCell], write: Callable[[EditCell], str]) -> Table:
    """A row per group, a column per arm; cells of one number format."""
    arms = list(dict.fromkeys(cell.arm for cell in cells if cell.arm not in ("full", "stale")))
    groups: dict[tuple[str, str], dict[str, EditCell]] = {}
    for cell in cells:
        groups.setdefault((cell.group, cell.at), {})[cell.arm] = cell
    rows = []
    for (group, at), by_arm in groups.items():
        written = [write(by_arm[arm]) if arm in by_arm else "-" for arm in arms]
        rows.append([f"{group}: {at}" if group != at else group, f"{by_arm['full'].n:,}", *written])
    return Table(["prompts", "n", *map(arm_name, arms)], rows)


def _cases_table(cases: Sequence[EditCase], policy: str) -> Table:
    """The prompts of which a policy recovers least, with what all policies recover; cases of one number format."""
    some = sorted((case for case in cases if policy in case.recovery), key=lambda case: case.recovery[policy])
    arms = list(dict.fromkeys(arm for case in some for arm in case.recovery))
    header = ["prompt", "family", "distance", "tokens, old → new", "fields", "gap", f"KL, {policy}"]
    rows = []
    for case in some[:NUM_WORST]:
        edit = case.edit
        row = [case.prompt.removeprefix("edits-"), edit.family.value, f"{edit.distance}"]
        row += [f"{edit.old_tokens} → {edit.new_tokens}", f"{edit.num_fields}", _maybe_two(case.gap)]
        rows.append([*row, divergence(case.kl[policy]), *(_maybe_two(case.recovery.get(arm)) for arm in arms)])
    return Table([*header, *arms], rows)


def _by_cost(cells: Sequence[EditCell]) -> Picture:
    """Recovery against the share of the prompt that is computed, a point a policy; cells of one number format."""
    found = [(cell, cell.recovery) for cell in cells if cell.recovery is not None]
    full = {arm_name(cell.arm): recovery for cell, recovery in found if cell.arm == "full"}
    series = [Curve(arm_name(c.arm), [(c.computed_share, r)], "none") for c, r in found if c.arm != "full"]
    dtype = found[0][0].dtype
    title = f"Recovery against cost: {dtype}"
    note = "Up is closer to the full prefill, left computes less. 95 % intervals over templates."
    drawn = plot(title, series, full, "share of the prompt that is computed", y_title=RECOVERY)
    return Picture(slug("recovery-by-cost", dtype), title, note, drawn)


def _cell(dtype: str, group: str, at: str, arm: str, prompts: Sequence[Arms]) -> EditCell:
    probes = [arms[arm] for arms in prompts]
    units = [probe.unit for probe in probes]
    recoveries = [found for arms in prompts if (found := _recovery(arms, arm)) is not None]
    both = [(arms[arm].chunk_hit_tokens, arms["in_place"].chunk_hit_tokens) for arms in prompts if "in_place" in arms]
    prompt_tokens = sum(probe.prompt_tokens for probe in probes)
    return EditCell(
        dtype=dtype,
        group=group,
        at=at,
        arm=arm,
        n=len(prompts),
        num_templates=len(set(units)),
        recovery=bootstrap(recoveries, units) if recoveries else None,
        recovery_median=float(np.median(recoveries)) if recoveries else None,
        recovery_p10=float(np.percentile(recoveries, 10)) if recoveries else None,
        kl=bootstrap([probe.kl for probe in probes], units),
        kl_max=max(probe.kl for probe in probes),
        computed_share=sum(probe.computed_tokens for probe in probes) / prompt_tokens,
        spliced_share=sum(probe.chunk_hit_tokens for probe in probes) / prompt_tokens,
        spliced_of_in_place=ratio(sum(spliced for spliced, _ in both), sum(in_place for _, in_place in both)),
    )


def _edit(arms: Arms) -> Edit:
    edit = arms["full"].edit
    assert edit is not None, "records of EDITS say what was edited"
    return edit


def _gap(arms: Arms) -> float | None:
    new, old = arms["full"].log_odds, arms["stale"].log_odds
    return None if new is None or old is None else new - old


def _recovery(arms: Arms, arm: str) -> float | None:
    gap, old, odds = _gap(arms), arms["stale"].log_odds, arms[arm].log_odds
    return None if gap is None or old is None or odds is None else (odds - old) / gap


def _tokens(number: int) -> str:
    return next((name for limit, name in _CLASSES.items() if number <= limit), "33 or more")


def _order(dtype: str, group: str, at: str, _: str) -> tuple[object, ...]:
    """float32 first, groups as they are declared, numbers by their value, arms as they were measured."""
    first = at.split(maxsplit=1)[0]
    groups = [*GROUPS, UNAFFECTED]
    return dtype != "float32", dtype, groups.index(group), int(first) if first.isdigit() else 0, at


def _two(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if -1 < round(value, 2) < 1 else f"{value:.2f}"


def _maybe_two(value: float | None) -> str:
    return optional(value, _two)


def _mean_and_p10(cell: EditCell) -> str:
    return f"{_maybe_two(cell.recovery.value if cell.recovery else None)} / {_maybe_two(cell.recovery_p10)}"


_FIGURES: dict[str, Callable[[EditCell], str]] = {
    "Recovery, mean / 10th percentile": _mean_and_p10,
    "Mean KL": lambda cell: divergence(cell.kl.value),
    "Computed, of the prompt": lambda cell: share(cell.computed_share),
    "Spliced, of what in_place splices": lambda cell: optional(cell.spliced_of_in_place, share),
}
"""The figures that are shown by group, with their titles."""
