"""Writes a fidelity run's report from its raw records: summary.json, report.md and report.html."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pic_bench.environment import read_environment
from pic_bench.fidelity import tables
from pic_bench.fidelity.compared import Panel, gate, make_cells, make_panels
from pic_bench.fidelity.config import PROBES, read_left_out, read_probes
from pic_bench.fidelity.record import MIN_GAP, SURE, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Summary, Thresholds
from pic_bench.fidelity.tables import Titled
from pic_bench.out_folder import CONFIG, ENVIRONMENT, read_json
from pic_bench.report.page import render_text, write_pages
from sglang_pic.errors import BenchError

NUM_WORST = 8  # of each experiment


class Section(NamedTuple):
    """Tables of one experiment."""

    experiment: Experiment
    title: str
    tables: list[Titled]


def write_report(folder: Path) -> Summary:
    """Write the report into a run's folder and return what it shows.

    Raises:
        BenchError: the folder has no records, or a file in it cannot be read.
    """
    summary = _summarize(folder)
    sections = make_sections(summary)
    write_pages(folder, summary, "fidelity.md.j2", f"Fidelity of {summary.model}", **_values(summary, sections))
    return summary


def headline(folder: Path) -> str:
    """The cells of a report that say most, as a person reads them in a terminal."""
    summary = read_json(folder / "summary.json", Summary, "of a fidelity run")
    table = tables.telling_table(summary.cells)
    return render_text("fidelity_overview.md.j2", summary=summary, table=table, mark=tables.UNDECIDED)


def make_sections(summary: Summary) -> list[Section]:
    """A section for every experiment that was run."""
    measured = {cell.experiment for cell in summary.cells}
    sections = {one: Section(one, tables.TITLES[one.value], []) for one in Experiment if one in measured}
    for where, cells in _places(summary.cells):
        section = sections[cells[0].experiment]
        has_groups = len({cell.group for cell in cells}) > 1
        for name in tables.CROSSED if has_groups else ():
            if (table := tables.crossed(cells, name)) is not None:
                section.tables.append(Titled(f"{name}: {where}", table))
        section.tables.append(Titled(f"All figures: {where}", tables.cell_table(cells), folded=has_groups))
    return list(sections.values())


def _places(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The cells of every experiment, number format, data, choice of calls and kind of donors, with the controls.

    Of a trace the calls that reuse much come first: of the others most are alike under every policy.
    """
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: -cell.min_chunk_hit):
        found.setdefault((cell.experiment, cell.dtype, cell.source, cell.min_chunk_hit), []).append(cell)
    for some in found.values():
        kinds = dict.fromkeys(cell.donors for cell in some if cell.arm not in CONTROLS)
        for donors in kinds or {some[0].donors: None}:
            kept = [cell for cell in some if cell.donors is donors or cell.arm in CONTROLS]
            yield tables.where(kept[-1]), kept


def _summarize(folder: Path) -> Summary:
    """All figures of a run's records; the same records in the same order give the same figures."""
    probes = read_probes(folder)
    if not probes:
        raise BenchError(f"{folder / PROBES}: no whole record; nothing was measured.")
    settings = read_json(folder / CONFIG, dict[str, object], "a run's settings") if (folder / CONFIG).exists() else {}
    config = {name: text for name, value in settings.items() if (text := _as_text(value)) not in ("", "null")}
    least = config.get("min_chunk_hit", "")
    thresholds = Thresholds(min_chunk_hit=int(least)) if least.isdecimal() else Thresholds()
    edits = gate(probe for probe in probes if probe.edit is not None)
    panels, repeated = make_panels([*(probe for probe in probes if probe.edit is None), *edits.kept], thresholds)
    return Summary(
        model=Path(config.get("model", "")).name or "an unnamed model",
        probes=len(probes),
        repeated=repeated,
        left_out=Counter(f"{one.experiment.value}, {one.dtype}" for one in read_left_out(folder)),
        limits=thresholds,
        config=config,
        environment=read_environment(folder) if (folder / ENVIRONMENT).exists() else None,
        cells=make_cells(panels, thresholds),
        worst=_worst(panels, thresholds),
        edits_alike=edits.alike,
        edits_computed=edits.computed,
    )


def _values(summary: Summary, sections: Sequence[Section]) -> dict[str, object]:
    cells, few = summary.cells, summary.limits.min_prompts
    unpaired = [cell.against_floor.unpaired for cell in cells if cell.against_floor and cell.against_floor.unpaired]
    policies = summary.config.get("policies", "") if summary.config.get("min_chunk_hit") else ""
    return {
        "environment": summary.environment,
        "thresholds": summary.limits,
        "sections": sections,
        "first_policy": policies.split(",")[0].partition("=")[0],
        "min_gap": MIN_GAP,
        "sure": SURE,
        "arm_name": tables.arm_name,
        "mark": tables.UNDECIDED,
        "unpaired": unpaired,
        "marked": sum(cell.undecided for cell in cells),
        "smallest": min((cell.n for cell in cells), default=0),
        "sessions": min((cell.num_units for cell in cells if cell.experiment is Experiment.TRACE), default=few),
    }


def _worst(panels: Sequence[Panel], thresholds: Thresholds) -> list[Probe]:
    """The highest KL of every experiment under the default setting, each prompt once."""
    found: list[Probe] = []
    for experiment in Experiment:
        spliced = [
            probe
            for panel in panels
            if panel.experiment is experiment
            for (_, arm), records in panel.arms.items()
            if arm in (thresholds.default_policy, "notes")
            for probe in records.values()
        ]
        highest: dict[tuple[str, str], Probe] = {}
        for probe in sorted(spliced, key=lambda probe: -probe.kl):
            highest.setdefault((probe.source, probe.prompt), probe)
        found += list(highest.values())[:NUM_WORST]
    return found


def _as_text(value: object) -> str:
    """A string as it is, a list of strings with commas, anything else as JSON on one line, without its quotes."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode().replace('"', "")
