"""The table and the picture of COMPOSE: how much of the skills is spliced, and how far the answer moves."""

from __future__ import annotations

from collections.abc import Sequence

from pic_bench.fidelity.pictures import Curve, Picture, plot, slug
from pic_bench.fidelity.record import Donors
from pic_bench.fidelity.summary import Cell, seam_of
from pic_bench.fidelity.tables import UNDECIDED, arm_name, kl_cell, top1_cell
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import divergence, plural, share

COMPILED = {Donors.ISOLATED: "alone", Donors.CONTEXT: "together"}


def composed_table(cells: Sequence[Cell]) -> Table:
    """A row for every number of skills, way to compile them and seam; the longest seam, the server's, first."""
    header = ["skills", "compiled", "seam", "n", "of the skills spliced", "KL mean", "p95", "same first token"]
    rows = []
    for cell in sorted((c for c in cells if c.donors in COMPILED), key=_place):
        spliced = share(cell.chunk_hit_tokens / max(1, cell.block_tokens))
        place = [plural(cell.num_blocks or 0, "skill"), COMPILED[cell.donors], str(seam_of(cell.arm)), f"{cell.n:,}"]
        # Prompts of a single library say nothing about other skills: no interval.
        one = cell.num_units == 1
        kl, top1 = (
            (divergence(cell.kl.value), share(cell.top1.value) + UNDECIDED * cell.undecided)
            if one
            else (kl_cell(cell), top1_cell(cell))
        )
        rows.append([*place, spliced, kl, divergence(cell.kl_p95), top1])
    return Table(header, rows)


def by_skills(cells: Sequence[Cell]) -> Picture:
    """KL against the number of skills: a curve for each way to compile them, with no seam and with the longest."""
    kept = [cell for cell in cells if cell.donors in COMPILED]
    counts = sorted({cell.num_blocks for cell in kept if cell.num_blocks is not None})
    seams = {seam for cell in kept if (seam := seam_of(cell.arm)) is not None}
    curves = []
    for donors, compiled in COMPILED.items():
        for seam, dash in sorted({min(seams): "--", max(seams): "-"}.items()):
            some = [cell for cell in kept if cell.donors is donors and seam_of(cell.arm) == seam]
            points = [(counts.index(cell.num_blocks or 0), cell.kl) for cell in some]
            if points:
                curves.append(Curve(f"{compiled}, seam {seam}", points, dash))
    # One skill behind its own system prompt is an exact hit, which would press everything else together.
    title = f"KL against number of skills: {kept[0].dtype}, {kept[0].source}"
    exact = {arm_name(cell.arm): cell.kl for cell in cells if cell.arm == "exact" and cell.num_blocks == counts[-1]}
    drawn = plot(title, curves, exact, "skills composed", slots=counts)
    note = "Skills compiled alone behind the system prompt, or together in one pass; 95 % intervals over libraries."
    if any(cell.undecided for cell in kept):
        note += f" {UNDECIDED} in the table: the model is undecided."
    return Picture(slug("skills", kept[0].dtype, kept[0].source), title, note, drawn)


def _place(cell: Cell) -> tuple[int, int, int]:
    return -(seam_of(cell.arm) or 0), cell.num_blocks or 0, list(COMPILED).index(cell.donors)
