"""The parts of a fidelity report in their order, as words, tables and pictures that any output can show.

It must not know Markdown or HTML. A part that nothing was measured for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pic_bench.fidelity.pictures import Picture, by_donors, by_runs, by_seam, by_shift, scores, trade_offs
from pic_bench.fidelity.record import Donors, Experiment
from pic_bench.fidelity.summary import CONTROLS, Cell, Claim, Summary, Verdict
from pic_bench.fidelity.tables import crossed, detail_table, kl_cell, question_table, top1_cell, trace_table
from pic_bench.fidelity.words import marks, others_table
from pic_bench.report.tables import Table

__all__ = ["Part", "Titled", "claims_by_question", "parts", "verdict"]


class Titled(NamedTuple):
    """A table under a title; folded away where the output can, because few will read it."""

    title: str
    table: Table
    folded: bool


class Part(NamedTuple):
    """A part of the report."""

    title: str
    notes: list[str]
    tables: list[Titled]
    pictures: list[Picture]


def parts(summary: Summary) -> list[Part]:
    """All parts between what the run says and the list of the worst."""
    found = [
        _grid(_of(summary, Experiment.GRID)),
        _shift(_of(summary, Experiment.SHIFT)),
        _questions(_of(summary, Experiment.QA)),
        _trace(_of(summary, Experiment.TRACE), summary.config),
    ]
    kept = [part for part in found if part.tables]
    if kept:
        kept[0].notes.append(marks(summary.limits))
    others = others_table(summary.cells)
    if others.rows:
        note = "Other models, other prompts: these say whether the figures are of the same size, not who is better."
        kept.append(Part("Figures of others beside ours", [note], [Titled("", others, folded=False)], []))
    return kept


def claims_by_question(summary: Summary) -> list[tuple[str, list[Claim]]]:
    """The answers under their questions."""
    questions = dict.fromkeys(claim.question for claim in summary.claims)
    return [(question, [claim for claim in summary.claims if claim.question == question]) for question in questions]


def verdict(claim: Claim) -> str:
    """The answer in a word or two."""
    return {Verdict.YES: "Yes", Verdict.NO: "No", Verdict.OPEN: "Cannot be said"}[claim.verdict]


def _grid(cells: Sequence[Cell]) -> Part:
    part = Part("Seam tokens, number of runs, donors", [], [], [])
    place: Callable[[Cell], int | None] = lambda cell: cell.num_blocks  # noqa: E731
    for about, some in _by_donors(cells):
        part.tables.extend(_tables(about, some, place, "runs spliced"))
        part.pictures.extend(p for p in (by_seam(some), by_runs(some)) if p is not None)
    for dtype, source in _places(cells):
        drawn = by_donors([cell for cell in cells if (cell.dtype, cell.source) == (dtype, source)])
        part.pictures.extend([drawn] if drawn is not None else [])
    return part


def _shift(cells: Sequence[Cell]) -> Part:
    part = Part("How far a run is moved", [], [], [])
    place: Callable[[Cell], int | None] = lambda cell: cell.shift  # noqa: E731
    for about, some in _by_donors(cells):
        part.tables.extend(_tables(about, some, place, "positions moved"))
        drawn = by_shift(some)
        part.pictures.extend([drawn] if drawn is not None else [])
    return part


def _questions(cells: Sequence[Cell]) -> Part:
    part = Part("Questions over documents in another order", [], [], [])
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        some = [cell for cell in cells if cell.dtype == dtype]
        part.tables.append(Titled(f"Scores: {dtype}", question_table(some), folded=False))
        part.tables.append(Titled(f"All metrics: {dtype}", detail_table(some, lambda _: None, "-"), folded=True))
        drawn = scores(some)
        part.pictures.extend([drawn] if drawn is not None else [])
    return part


def _trace(cells: Sequence[Cell], config: Mapping[str, str]) -> Part:
    part = Part("Calls of a trace, in order, under each policy", [], [], [])
    if (wanted := config.get("min_chunk_hit")) and (policies := config.get("policies")):
        first = policies.split(",")[0].partition("=")[0]
        part.notes.append(f"Measured are the calls with {wanted} or more chunk-hit tokens under `{first}`.")
    for dtype, source in _places(cells):
        some = [cell for cell in cells if (cell.dtype, cell.source) == (dtype, source)]
        # The calls that reuse much come first: of the others most are alike under every policy.
        for least in sorted({cell.min_chunk_hit for cell in some}, reverse=True):
            calls = [cell for cell in some if cell.min_chunk_hit == least and cell.arm != "full"]
            which = f"calls with {least} or more chunk-hit tokens" if least else "all measured calls"
            part.tables.append(Titled(f"{dtype}, {source}: {which}", trace_table(calls), folded=False))
            part.pictures.extend(trade_offs(calls))
    return part


def _tables(about: str, cells: Sequence[Cell], place: Callable[[Cell], int | None], unit: str) -> Iterator[Titled]:
    columns = sorted({where for cell in cells if (where := place(cell)) is not None})
    shown = [cell for cell in cells if cell.arm != "full"]
    head = f"{unit} →"
    yield Titled(f"Mean KL: {about}", crossed(shown, columns, place, head, kl_cell), folded=False)
    yield Titled(f"Top-1 agreement: {about}", crossed(shown, columns, place, head, top1_cell), folded=False)
    yield Titled(f"All metrics: {about}", detail_table(cells, place, unit), folded=True)


def _by_donors(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The cells of a table: one dtype, data and kind of donors, with the controls."""
    for dtype, source in _places(cells):
        some = [cell for cell in cells if (cell.dtype, cell.source) == (dtype, source)]
        kinds = [d for d in Donors if any(c.donors is d and c.arm not in CONTROLS for c in some)]
        for donors in kinds or [Donors.NONE]:
            where = {Donors.ISOLATED: ", donors alone", Donors.CONTEXT: ", donors in context"}.get(donors, "")
            kept = [cell for cell in some if cell.donors is donors or cell.arm in CONTROLS]
            yield f"{dtype}, {source}{where}", kept


def _places(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.dtype, cell.source) for cell in cells))


def _of(summary: Summary, experiment: Experiment) -> list[Cell]:
    return [cell for cell in summary.cells if cell.experiment is experiment]
