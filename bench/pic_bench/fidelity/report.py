"""Writes a fidelity run's report from its raw records: summary.json, report.md, report.html and plot-*.svg."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pic_bench.environment import Environment
from pic_bench.fidelity.cells import make_cells
from pic_bench.fidelity.comparisons import make_comparisons
from pic_bench.fidelity.drift import make_drifts
from pic_bench.fidelity.edit_cells import GATED, gate, make_edit_cases, make_edit_cells, split_edits
from pic_bench.fidelity.edited import edit_table
from pic_bench.fidelity.folder import PROBES, read_environment, read_left_out, read_probes
from pic_bench.fidelity.panels import Panel, make_panels
from pic_bench.fidelity.record import Experiment, Probe
from pic_bench.fidelity.sections import Section, make_sections
from pic_bench.fidelity.summary import Summary, Thresholds, Worst
from pic_bench.fidelity.tables import UNDECIDED, arm_name, comparisons_table, telling_table
from pic_bench.out_folder import CONFIG, ENVIRONMENT, read_json, write_json
from pic_bench.report.page import render_pages, render_text
from sglang_pic.errors import BenchError

NUM_WORST = 8
"""Of each experiment."""


def write_report(folder: Path, thresholds: Thresholds | None = None) -> Summary:
    """Write the report into a run's folder and return what it shows; plots of an earlier report are deleted.

    Raises:
        BenchError: the folder has no records, or a file in it cannot be read.
    """
    probes = read_probes(folder)
    if not probes:
        raise BenchError(f"{folder / PROBES}: no whole record; nothing was measured.")
    config = _read_config(folder / CONFIG)
    if thresholds is None:
        least = config.get("min_chunk_hit", "")
        thresholds = Thresholds(min_chunk_hit=int(least)) if least.isdecimal() else Thresholds()
    summary = summarize(
        probes,
        thresholds,
        config=config,
        environment=read_environment(folder) if (folder / ENVIRONMENT).exists() else None,
        left_out=Counter(f"{one.experiment.value}, {one.dtype}" for one in read_left_out(folder)),
    )
    sections = make_sections(summary)
    pictures = [picture for section in sections for picture in section.pictures]
    title = f"Fidelity of {summary.model}"
    pages = render_pages("fidelity.md.j2", title, {p.name: p.drawing for p in pictures}, **_values(summary, sections))
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    for stale in folder.glob("plot-*.svg"):
        stale.unlink()
    for picture in pictures:
        what, _, about = picture.title.partition(": ")
        (folder / f"{picture.name}.svg").write_text(picture.drawing.standalone(what, about), "utf8")
    return summary


def headline(folder: Path) -> str:
    """The cells of a report that say most, as a person reads them in a terminal."""
    summary = read_json(folder / "summary.json", Summary, "of a fidelity run")
    return render_text(
        "fidelity_overview.md.j2",
        summary=summary,
        table=telling_table(summary.cells),
        mark=UNDECIDED,
        edits=edit_table(summary.edits, GATED),
    )


def summarize(
    probes: Sequence[Probe],
    thresholds: Thresholds,
    *,
    config: dict[str, str],
    environment: Environment | None,
    left_out: dict[str, int],
) -> Summary:
    """All figures of the records; the same records in the same order give the same figures."""
    others, edits = split_edits(probes)
    panels, repeated = make_panels(others, thresholds)
    return Summary(
        model=Path(config.get("model", "")).name or "an unnamed model",
        probes=len(probes),
        repeated=repeated,
        left_out=left_out,
        limits=thresholds,
        config=config,
        environment=environment,
        cells=make_cells(panels, thresholds),
        comparisons=make_comparisons(panels),
        drifts=make_drifts(panels),
        worst=_worst(panels, thresholds),
        edits=make_edit_cells(edits),
        edit_cases=make_edit_cases(edits),
        edits_alike=gate(edits).alike,
        edits_computed=gate(edits).computed,
    )


def _values(summary: Summary, sections: Sequence[Section]) -> dict[str, object]:
    """What the template shows, and the figures that its limits name."""
    cells, few = summary.cells, summary.limits.min_prompts
    unpaired = [cell.against_floor.unpaired for cell in cells if cell.against_floor and cell.against_floor.unpaired]
    sessions = [cell.num_units for cell in cells if cell.experiment is Experiment.TRACE and cell.num_units]
    return {
        "summary": summary,
        "environment": summary.environment,
        "thresholds": summary.limits,
        "sections": sections,
        "comparisons": comparisons_table(summary.comparisons, few),
        "arm_name": arm_name,
        "mark": UNDECIDED,
        "unpaired": unpaired,
        "marked": sum(cell.undecided or cell.incompetent for cell in cells),
        "smallest": min((cell.n for cell in cells), default=0),
        "sessions": min(sessions, default=few),
    }


def _worst(panels: Sequence[Panel], thresholds: Thresholds) -> list[Worst]:
    """The highest KL of every experiment under the default setting, each prompt once."""
    found: list[Worst] = []
    for experiment in Experiment:
        spliced = [
            (probe, panel.arm(panel.floor(donors) or "", donors).get(unit))
            for panel in panels
            if panel.experiment is experiment and not panel.min_chunk_hit
            for (donors, arm), records in panel.arms.items()
            if arm in ("seam-1", thresholds.default_policy)
            for unit, probe in records.items()
        ]
        highest: dict[tuple[str, str], Worst] = {}
        for probe, floor in sorted(spliced, key=lambda pair: -pair[0].kl):
            highest.setdefault((probe.source, probe.prompt), _as_worst(probe, floor))
        found += list(highest.values())[:NUM_WORST]
    return found


def _as_worst(probe: Probe, floor: Probe | None) -> Worst:
    same = {name: getattr(probe, name) for name in Worst.__struct_fields__ if name not in ("shift", "floor_kl")}
    shift = probe.shift if probe.experiment is Experiment.SHIFT else None
    return Worst(**same, shift=shift, floor_kl=None if floor is None else floor.kl)


def _read_config(path: Path) -> dict[str, str]:
    """Every setting as text; nothing where there is no file."""
    settings = read_json(path, dict[str, object], "a run's settings") if path.exists() else {}
    return {name: text for name, value in settings.items() if (text := _as_text(value)) not in ("", "null")}


def _as_text(value: object) -> str:
    """A string as it is, a list of strings with commas, anything else as JSON on one line, without its quotes."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode().replace('"', "")
