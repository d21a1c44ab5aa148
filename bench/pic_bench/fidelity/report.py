"""Writes a fidelity run's report from its raw records: summary.json, report.md, report.html and plot-*.svg."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pic_bench.fidelity import drift, pictures, recovery, tables
from pic_bench.fidelity.compared import Panel, make_cells, make_comparisons, make_panels
from pic_bench.fidelity.folder import PROBES, read_environment, read_left_out, read_probes
from pic_bench.fidelity.pictures import Picture
from pic_bench.fidelity.record import MIN_GAP, Donors, Experiment, Probe
from pic_bench.fidelity.summary import CONTROLS, Cell, Summary, Thresholds, Worst
from pic_bench.fidelity.tables import Titled
from pic_bench.out_folder import CONFIG, ENVIRONMENT, read_json, write_json
from pic_bench.report.numbers import plural
from pic_bench.report.page import render_pages, render_text
from sglang_pic.errors import BenchError

NUM_WORST = 8
"""Of each experiment."""
Shown = Iterator[Titled | Picture | None]


class Section(NamedTuple):
    """Tables and pictures of one experiment."""

    title: str
    tables: list[Titled]
    pictures: list[Picture]
    first_policy: str = ""
    """The policy that says which calls of a trace were measured."""
    note: str = ""


def write_report(folder: Path) -> Summary:
    """Write the report into a run's folder and return what it shows; plots of an earlier report are deleted.

    Raises:
        BenchError: the folder has no records, or a file in it cannot be read.
    """
    summary = _summarize(folder)
    sections = make_sections(summary)
    drawn = [picture for section in sections for picture in section.pictures]
    title = f"Fidelity of {summary.model}"
    pages = render_pages("fidelity.md.j2", title, {p.name: p.drawing for p in drawn}, **_values(summary, sections))
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    for stale in folder.glob("plot-*.svg"):
        stale.unlink()
    for picture in drawn:
        what, _, about = picture.title.partition(": ")
        (folder / f"{picture.name}.svg").write_text(picture.drawing.standalone(what, about), "utf8")
    return summary


def headline(folder: Path) -> str:
    """The cells of a report that say most, as a person reads them in a terminal."""
    summary = read_json(folder / "summary.json", Summary, "of a fidelity run")
    return render_text(
        "fidelity_overview.md.j2",
        summary=summary,
        table=tables.telling_table(summary.cells),
        mark=tables.UNDECIDED,
        edits=recovery.edit_table(summary.edits, recovery.GATED),
    )


def make_sections(summary: Summary) -> list[Section]:
    """A section for every experiment that was run."""
    of = {experiment: [c for c in summary.cells if c.experiment is experiment] for experiment in Experiment}
    policies = summary.config.get("policies", "") if summary.config.get("min_chunk_hit") else ""
    alike, computed = plural(summary.edits_alike, "prompt"), plural(summary.edits_computed, "prompt")
    edited = (
        "Each prompt is served behind the same prompt with other values in 1 to 4 of its fields, whose rows are the "
        f"donors. Left out: {alike} whose two full prefills differ by less than {MIN_GAP} nats, and {computed} of "
        "which no policy splices anything."
    )
    found = [
        _section(
            "Seam tokens, number of runs, donors",
            _passages(of[Experiment.GRID], "runs spliced", pictures.by_seam, pictures.by_runs),
        ),
        _section("How far a run is moved", _passages(of[Experiment.SHIFT], "positions moved", pictures.by_shift)),
        _section("Questions over documents in another order", _questions(of[Experiment.QA])),
        _section(
            "Calls of a trace, in order, under each policy",
            _trace(of[Experiment.TRACE]),
            first_policy=policies.split(",")[0].partition("=")[0],
        ),
        _section("Skills compiled once, composed in other orders", _skills(of[Experiment.COMPOSE])),
        _section("A field that changes at every turn of a conversation", drift.shown(summary.drifts)),
        _section(
            "A field changed, the rest of the prompt spliced",
            recovery.shown(summary.edits, summary.edit_cases),
            note=edited,
        ),
    ]
    return [section for section in found if section.tables]


def _section(title: str, shown: Iterable[Titled | Picture | None], **words: str) -> Section:
    found = list(shown)
    tables = [one for one in found if isinstance(one, Titled)]
    return Section(title, tables, [one for one in found if isinstance(one, Picture)], **words)


def _passages(cells: Sequence[Cell], unit: str, *draw: Callable[[Sequence[Cell]], Picture | None]) -> Shown:
    """GRID by number of blocks, or SHIFT by positions: for each dtype, data and kind of donors, with the controls."""
    for where, of_place in _places(cells):
        kinds = [d for d in Donors if any(c.donors is d and c.arm not in CONTROLS for c in of_place)]
        for donors in kinds or [Donors.NONE]:
            some = [cell for cell in of_place if cell.donors is donors or cell.arm in CONTROLS]
            arms = [cell for cell in some if cell.arm != "full"]
            about = where + (f", {pictures.DONORS[donors]}" if donors in pictures.DONORS else "")
            yield Titled(f"Mean KL: {about}", tables.crossed(arms, f"{unit} →", tables.kl_cell))
            yield Titled(f"Top-1 agreement: {about}", tables.crossed(arms, f"{unit} →", tables.top1_cell))
            yield Titled(f"All metrics: {about}", tables.detail_table(some, unit), folded=True)
            yield from (one(some) for one in draw)


def _questions(cells: Sequence[Cell]) -> Shown:
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        some = [cell for cell in cells if cell.dtype == dtype]
        yield Titled(f"Scores: {dtype}", tables.question_table(some))
        yield Titled(f"All metrics: {dtype}", tables.detail_table(some, "-"), folded=True)
        yield pictures.scores(some)


def _trace(cells: Sequence[Cell]) -> Shown:
    for where, some in _places(cells):
        # The calls that reuse much come first: of the others most are alike under every policy.
        for least in sorted({cell.min_chunk_hit for cell in some}, reverse=True):
            calls = [cell for cell in some if cell.min_chunk_hit == least and cell.arm != "full"]
            which = f"calls with {least} or more chunk-hit tokens" if least else "all measured calls"
            yield Titled(f"{where}: {which}", tables.trace_table(calls))
            yield from pictures.trade_offs(calls)


def _skills(cells: Sequence[Cell]) -> Shown:
    for where, some in _places(cells):
        yield Titled(f"Skills composed: {where}", tables.skills_table(some))
        yield Titled(f"All metrics: {where}", tables.detail_table(some, "skills"), folded=True)
        yield pictures.by_skills(some)


def _places(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The cells of every dtype and data, with the two as words."""
    for dtype, source in dict.fromkeys((cell.dtype, cell.source) for cell in cells):
        yield f"{dtype}, {source}", [cell for cell in cells if (cell.dtype, cell.source) == (dtype, source)]


def _summarize(folder: Path) -> Summary:
    """All figures of a run's records; the same records in the same order give the same figures."""
    probes = read_probes(folder)
    if not probes:
        raise BenchError(f"{folder / PROBES}: no whole record; nothing was measured.")
    config = _read_config(folder / CONFIG)
    least = config.get("min_chunk_hit", "")
    thresholds = Thresholds(min_chunk_hit=int(least)) if least.isdecimal() else Thresholds()
    panels, repeated = make_panels((probe for probe in probes if probe.edit is None), thresholds)
    edits = recovery.gate([probe for probe in probes if probe.edit is not None])
    return Summary(
        model=Path(config.get("model", "")).name or "an unnamed model",
        probes=len(probes),
        repeated=repeated,
        left_out=Counter(f"{one.experiment.value}, {one.dtype}" for one in read_left_out(folder)),
        limits=thresholds,
        config=config,
        environment=read_environment(folder) if (folder / ENVIRONMENT).exists() else None,
        cells=make_cells(panels, thresholds),
        comparisons=make_comparisons(panels),
        drifts=drift.make_drifts(panels),
        worst=_worst(panels, thresholds),
        edits=recovery.make_edit_cells(edits),
        edit_cases=recovery.make_edit_cases(edits),
        edits_alike=edits.alike,
        edits_computed=edits.computed,
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
        "comparisons": tables.comparisons_table(summary.comparisons, few),
        "arm_name": tables.arm_name,
        "mark": tables.UNDECIDED,
        "unpaired": unpaired,
        "marked": sum(cell.says_little for cell in cells),
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
