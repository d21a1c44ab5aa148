"""The sections of a fidelity report in their order: notes, tables and pictures. What was not measured has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pic_bench.fidelity.pictures import Picture, by_runs, by_seam, by_shift, scores, trade_offs
from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.summary import CONTROLS, Cell, Summary
from pic_bench.fidelity.tables import crossed, detail_table, kl_cell, question_table, top1_cell, trace_table
from pic_bench.report.markdown import Table


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


def make_sections(summary: Summary) -> list[Section]:
    """A section for every experiment that was run."""
    of = {experiment: [c for c in summary.cells if c.experiment is experiment] for experiment in Experiment}
    found = [_grid(of[Experiment.GRID]), _shift(of[Experiment.SHIFT]), _questions(of[Experiment.QA])]
    policies = summary.config.get("policies", "") if summary.config.get("min_chunk_hit") else ""
    first = policies.split(",")[0].partition("=")[0]
    return [section for section in (*found, _trace(of[Experiment.TRACE], first)) if section.tables]


def _grid(cells: Sequence[Cell]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for about, some in _by_donors(cells):
        tables += _tables(about, some, lambda cell: cell.num_blocks, "runs spliced")
        pictures += _drawn(by_seam(some), by_runs(some))
    return Section("Seam tokens, number of runs, donors", tables, pictures)


def _shift(cells: Sequence[Cell]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for about, some in _by_donors(cells):
        tables += _tables(about, some, lambda cell: cell.shift, "positions moved")
        pictures += _drawn(by_shift(some))
    return Section("How far a run is moved", tables, pictures)


def _questions(cells: Sequence[Cell]) -> Section:
    tables: list[Titled] = []
    pictures: list[Picture] = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        some = [cell for cell in cells if cell.dtype == dtype]
        tables.append(Titled(f"Scores: {dtype}", question_table(some)))
        tables.append(Titled(f"All metrics: {dtype}", detail_table(some, lambda _: None, "-"), folded=True))
        pictures += _drawn(scores(some))
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


def _tables(about: str, cells: Sequence[Cell], place: Callable[[Cell], int | None], unit: str) -> Iterator[Titled]:
    columns = sorted({where for cell in cells if (where := place(cell)) is not None})
    shown = [cell for cell in cells if cell.arm != "full"]
    head = f"{unit} →"
    yield Titled(f"Mean KL: {about}", crossed(shown, columns, place, head, kl_cell))
    yield Titled(f"Top-1 agreement: {about}", crossed(shown, columns, place, head, top1_cell))
    yield Titled(f"All metrics: {about}", detail_table(cells, place, unit), folded=True)


def _by_donors(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The cells of a table: one dtype, data and kind of donors, with the controls."""
    for (dtype, source), some in _places(cells).items():
        kinds = [d for d in Donors if any(c.donors is d and c.arm not in CONTROLS for c in some)]
        for donors in kinds or [Donors.NONE]:
            where = {Donors.ISOLATED: ", donors alone", Donors.CONTEXT: ", donors in context"}.get(donors, "")
            kept = [cell for cell in some if cell.donors is donors or cell.arm in CONTROLS]
            yield f"{dtype}, {source}{where}", kept


def _places(cells: Sequence[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The cells of every dtype and data."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.dtype, cell.source), []).append(cell)
    return found


def _drawn(*pictures: Picture | None) -> Iterable[Picture]:
    return (picture for picture in pictures if picture is not None)
