"""The sections of a fidelity report, with their tables and pictures; an experiment that was not run has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pic_bench.fidelity.composed import by_skills, composed_table
from pic_bench.fidelity.drift import by_turn, drift_table
from pic_bench.fidelity.edit_cells import GATED, UNAFFECTED
from pic_bench.fidelity.edited import (
    EDIT_FIGURES,
    by_cost,
    edit_cases_table,
    edit_groups_table,
    edit_table,
    mean_and_p10,
)
from pic_bench.fidelity.pictures import DONORS, Picture, by_runs, by_seam, by_shift, scores, trade_offs
from pic_bench.fidelity.record import MIN_GAP, Donors, Experiment
from pic_bench.fidelity.summary import CONTROLS, Cell, Drift, Summary
from pic_bench.fidelity.tables import crossed, detail_table, kl_cell, question_table, top1_cell, trace_table
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import plural


class Titled(NamedTuple):
    """A table under a title; folded away where few will read it."""

    title: str
    table: Table
    folded: bool = False


class Section(NamedTuple):
    """Tables and pictures of one experiment."""

    title: str
    tables: list[Titled]
    pictures: list[Picture]
    first_policy: str = ""
    """The policy that says which calls of a trace were measured."""
    note: str = ""


def make_sections(summary: Summary) -> list[Section]:
    """A section for every experiment that was run."""
    of = {experiment: [c for c in summary.cells if c.experiment is experiment] for experiment in Experiment}
    policies = summary.config.get("policies", "") if summary.config.get("min_chunk_hit") else ""
    found = [
        _passages("Seam tokens, number of runs, donors", of[Experiment.GRID], "runs spliced", (by_seam, by_runs)),
        _passages("How far a run is moved", of[Experiment.SHIFT], "positions moved", (by_shift,)),
        _questions(of[Experiment.QA]),
        _trace(of[Experiment.TRACE], policies.split(",")[0].partition("=")[0]),
        _composed(of[Experiment.COMPOSE]),
        _turns(summary.drifts),
        _edits(summary),
    ]
    return [section for section in found if section.tables]


def _passages(
    title: str, cells: Sequence[Cell], unit: str, draw: Sequence[Callable[[Sequence[Cell]], Picture | None]]
) -> Section:
    """GRID by number of blocks, or SHIFT by positions: for each dtype, data and kind of donors, with the controls."""
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for (dtype, source), of_place in _places(cells).items():
        kinds = [d for d in Donors if any(c.donors is d and c.arm not in CONTROLS for c in of_place)]
        for donors in kinds or [Donors.NONE]:
            some = [cell for cell in of_place if cell.donors is donors or cell.arm in CONTROLS]
            shown = [cell for cell in some if cell.arm != "full"]
            about = f"{dtype}, {source}" + (f", {DONORS[donors]}" if donors in DONORS else "")
            tables += [
                Titled(f"Mean KL: {about}", crossed(shown, f"{unit} →", kl_cell)),
                Titled(f"Top-1 agreement: {about}", crossed(shown, f"{unit} →", top1_cell)),
                Titled(f"All metrics: {about}", detail_table(some, unit), folded=True),
            ]
            pictures += [drawn for one in draw if (drawn := one(some)) is not None]
    return Section(title, tables, pictures)


def _questions(cells: Sequence[Cell]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        some = [cell for cell in cells if cell.dtype == dtype]
        tables.append(Titled(f"Scores: {dtype}", question_table(some)))
        tables.append(Titled(f"All metrics: {dtype}", detail_table(some, "-"), folded=True))
        pictures += [drawn] if (drawn := scores(some)) is not None else []
    return Section("Questions over documents in another order", tables, pictures)


def _trace(cells: Sequence[Cell], first_policy: str) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for (dtype, source), some in _places(cells).items():
        # The calls that reuse much come first: of the others most are alike under every policy.
        for least in sorted({cell.min_chunk_hit for cell in some}, reverse=True):
            calls = [cell for cell in some if cell.min_chunk_hit == least and cell.arm != "full"]
            which = f"calls with {least} or more chunk-hit tokens" if least else "all measured calls"
            tables.append(Titled(f"{dtype}, {source}: {which}", trace_table(calls)))
            pictures += trade_offs(calls)
    return Section("Calls of a trace, in order, under each policy", tables, pictures, first_policy)


def _composed(cells: Sequence[Cell]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for (dtype, source), some in _places(cells).items():
        tables.append(Titled(f"Skills composed: {dtype}, {source}", composed_table(some)))
        tables.append(Titled(f"All metrics: {dtype}, {source}", detail_table(some, "skills"), folded=True))
        pictures.append(by_skills(some))
    return Section("Skills compiled once, composed in other orders", tables, pictures)


def _turns(drifts: Sequence[Drift]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for dtype in dict.fromkeys(drift.dtype for drift in drifts):
        some = [drift for drift in drifts if drift.dtype == dtype]
        tables.append(Titled(f"KL from the first turns to the last: {dtype}", drift_table(some)))
        pictures.append(by_turn(some))
    return Section("A field that changes at every turn of a conversation", tables, pictures)


def _edits(summary: Summary) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    cells = summary.edits
    if any(cell.group == GATED for cell in cells):
        tables.append(Titled("Prompts whose answer depends on the field", edit_table(cells, GATED)))
    if any(cell.group == UNAFFECTED for cell in cells):
        tables.append(Titled("Prompts whose answer does not depend on it", edit_table(cells, UNAFFECTED)))
    for dtype in dict.fromkeys(cell.dtype for cell in cells if cell.group == GATED):
        some = [cell for cell in cells if cell.dtype == dtype and cell.group != UNAFFECTED]
        pictures.append(by_cost([cell for cell in some if cell.group == GATED]))
        tables += [
            Titled(f"{what}: {dtype}", edit_groups_table(some, write), folded=write is not mean_and_p10)
            for what, write in EDIT_FIGURES.items()
        ]
        cases = [case for case in summary.edit_cases if case.dtype == dtype]
        for arm in dict.fromkeys(arm for case in cases for arm in case.recovery if arm != "recompile"):
            title = f"Least recovered under {arm}: {dtype}"
            tables.append(Titled(title, edit_cases_table(cases, arm), folded=arm != "notes"))
    alike, computed = plural(summary.edits_alike, "prompt"), plural(summary.edits_computed, "prompt")
    note = (
        "Each prompt is served behind the same prompt with other values in 1 to 4 of its fields, whose rows are the "
        f"donors. Left out: {alike} whose two full prefills differ by less than {MIN_GAP} nats, and {computed} of "
        "which no policy splices anything."
    )
    return Section("A field changed, the rest of the prompt spliced", tables, pictures, note=note)


def _places(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The cells of every dtype and data."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.dtype, cell.source), []).append(cell)
    return found
