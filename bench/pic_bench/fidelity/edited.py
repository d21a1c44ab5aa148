"""The tables and the picture of EDITS: what a policy recovers, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pic_bench.fidelity.pictures import RECOVERY, Curve, Picture, plot, slug
from pic_bench.fidelity.summary import EditCase, EditCell
from pic_bench.fidelity.tables import arm_name
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, share, with_interval

NUM_WORST = 12


def edit_table(cells: Sequence[EditCell], group: str) -> Table:
    """What each arm recovers and what it costs, on the prompts of one way of grouping."""
    some = [cell for cell in cells if cell.group == group]
    header = ["policy", "n", "templates", "recovery, mean", "median", "10th percentile", "KL mean", "max"]
    header += ["computed", "spliced", "of in place's"]
    rows = []
    for cell in some:
        where = [cell.dtype, "" if cell.at == "all" else cell.at, arm_name(cell.arm)]
        row = [", ".join(filter(None, where)), f"{cell.n:,}", f"{cell.num_templates}"]
        row += [
            with_interval(cell.recovery, _two),
            *(_shown(v, _two) for v in (cell.recovery_median, cell.recovery_p10)),
        ]
        row += [with_interval(cell.kl, divergence), divergence(cell.kl_max)]
        row += [share(cell.computed_share), share(cell.spliced_share), _shown(cell.spliced_of_in_place, share)]
        rows.append(row)
    if all(cell.recovery is None for cell in some):
        header, rows = header[:3] + header[6:], [row[:3] + row[6:] for row in rows]
    return Table(header, rows)


def edit_groups_table(cells: Sequence[EditCell], write: Callable[[EditCell], str]) -> Table:
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


def edit_cases_table(cases: Sequence[EditCase], policy: str) -> Table:
    """The prompts of which a policy recovers least, with what all policies recover; cases of one number format."""
    some = sorted((case for case in cases if policy in case.recovery), key=lambda case: case.recovery[policy])
    arms = list(dict.fromkeys(arm for case in some for arm in case.recovery))
    header = ["prompt", "family", "distance", "tokens, old → new", "fields", "gap", f"KL, {policy}"]
    rows = []
    for case in some[:NUM_WORST]:
        edit = case.edit
        row = [case.prompt.removeprefix("edits-"), edit.family.value, f"{edit.distance}"]
        row += [f"{edit.old_tokens} → {edit.new_tokens}", f"{edit.num_fields}", _shown(case.gap, _two)]
        rows.append([*row, divergence(case.kl[policy]), *(_shown(case.recovery.get(arm), _two) for arm in arms)])
    return Table([*header, *arms], rows)


def mean_and_p10(cell: EditCell) -> str:
    """Mean recovery and its 10th percentile."""
    mean = cell.recovery.value if cell.recovery else None
    return f"{_shown(mean, _two)} / {_shown(cell.recovery_p10, _two)}"


def by_cost(cells: Sequence[EditCell]) -> Picture:
    """Recovery against the share of the prompt that is computed, a point a policy; cells of one number format."""
    found = [(cell, cell.recovery) for cell in cells if cell.recovery is not None]
    full = {arm_name(cell.arm): recovery for cell, recovery in found if cell.arm == "full"}
    series = [Curve(arm_name(c.arm), [(c.computed_share, r)], "none") for c, r in found if c.arm != "full"]
    dtype = found[0][0].dtype
    title = f"Recovery against cost: {dtype}"
    note = "Up is closer to the full prefill, left computes less. 95 % intervals over templates."
    drawn = plot(title, series, full, "share of the prompt that is computed", y_title=RECOVERY)
    return Picture(slug("recovery-by-cost", dtype), title, note, drawn)


def _two(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if -1 < round(value, 2) < 1 else f"{value:.2f}"


def _shown(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


EDIT_FIGURES: dict[str, Callable[[EditCell], str]] = {
    "Recovery, mean / 10th percentile": mean_and_p10,
    "Mean KL": lambda cell: divergence(cell.kl.value),
    "Computed, of the prompt": lambda cell: share(cell.computed_share),
    "Spliced, of what in_place splices": lambda cell: _shown(cell.spliced_of_in_place, share),
}
"""The figures that are shown by group, with their titles."""
