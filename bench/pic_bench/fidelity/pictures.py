"""Which pictures a fidelity report has: what is drawn against what, chosen from the cells.

It must not know how a picture is drawn, or pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pic_bench.fidelity.numbers import divergence, points, share, tick
from pic_bench.fidelity.plots import Band, Drawing, Point, Row, Series, Ticks, curves, intervals, trade_off
from pic_bench.fidelity.record import Donors
from pic_bench.fidelity.summary import CONTROLS, Cell, seam_of
from pic_bench.fidelity.tables import UNDECIDED, arm_name
from pic_bench.report.tables import plural

__all__ = ["Picture", "by_donors", "by_runs", "by_seam", "by_shift", "scores", "trade_offs"]

KL = Ticks(tick, divergence, log=True)
SHARE = Ticks(lambda value: f"{value * 100:g} %", share, log=False)
POINTS = Ticks(lambda value: f"{value * 100:+g}" if value else "0", points, log=False)
KL_TITLE = "mean KL of the first token, nats"
DASHES = ("", "6 3", "2 3")
DONORS = {Donors.ISOLATED: "donors alone", Donors.CONTEXT: "donors in context"}


class Picture(NamedTuple):
    """A drawing with the words around it; `name` is its file's."""

    name: str
    title: str
    note: str
    drawing: Drawing


def by_seam(cells: Sequence[Cell]) -> Picture | None:
    """KL against seam tokens, a curve for each number of runs; cells of one dtype, data and kind of donors."""
    kept = [cell for cell in cells if seam_of(cell.arm) is not None]
    seams = sorted({seam for cell in kept if (seam := seam_of(cell.arm)) is not None})
    if len(seams) < 2:
        return None
    series = []
    for number, blocks in enumerate(_columns(kept)):
        curve = [(seams.index(seam_of(c.arm) or 0), c.kl) for c in kept if c.num_blocks == blocks]
        series.append(Series(plural(blocks, "run"), curve, DASHES[number // 3 % 3]))
    bands = _floor(cells, _columns(kept)[-1:])
    drawing = curves(
        _label("KL against seam tokens", kept), _texts(seams), series, bands, KL, ("seam tokens", KL_TITLE)
    )
    note = "A curve for each number of runs, with 95 % intervals over prompts; naive is in the next picture."
    return Picture(_file("kl-by-seam", kept), f"KL against seam tokens: {_about(kept)}", note, drawing)


def by_runs(cells: Sequence[Cell]) -> Picture | None:
    """KL against the number of runs, a curve for each of a few arms."""
    columns = _columns([cell for cell in cells if cell.arm not in CONTROLS])
    if len(columns) < 2:
        return None
    series = _arms(cells, columns, lambda cell: cell.num_blocks)
    spliced = [cell for cell in cells if cell.arm not in CONTROLS]
    titles = ("runs spliced into the prompt", KL_TITLE)
    drawing = curves(_label("KL against runs", spliced), _texts(columns), series, _floor(cells, columns), KL, titles)
    title = f"KL against number of runs: {_about(spliced)}"
    return Picture(_file("kl-by-runs", spliced), title, "Naive is spliced without rotation.", drawing)


def by_shift(cells: Sequence[Cell]) -> Picture | None:
    """KL against how far a block was moved."""
    spliced = [cell for cell in cells if cell.arm not in CONTROLS]
    columns = sorted({cell.shift for cell in spliced if cell.shift is not None})
    if len(columns) < 2:
        return None
    series = _arms(cells, columns, lambda cell: cell.shift)
    titles = ("positions moved", KL_TITLE)
    bands = _floor(cells, None)
    drawing = curves(_label("KL against shift", spliced), _texts(columns), series, bands, KL, titles)
    note = "One block, moved; rotated and not rotated."
    return Picture(_file("kl-by-shift", spliced), f"KL against shift: {_about(spliced)}", note, drawing)


def by_donors(cells: Sequence[Cell]) -> Picture | None:
    """Isolated against in-context donors, over the number of runs; cells of one dtype and data."""
    kept = [cell for cell in cells if seam_of(cell.arm) in (0, 1) and cell.donors in DONORS]
    columns = _columns(kept)
    if len({cell.donors for cell in kept}) < 2 or not columns:
        return None
    series = []
    for donors, arm in ((d, a) for d in DONORS for a in ("seam-0", "seam-1")):
        curve = [(columns.index(c.num_blocks or 0), c.kl) for c in kept if (c.donors, c.arm) == (donors, arm)]
        series.append(Series(f"{DONORS[donors]}, {arm_name(arm)}", curve, "" if arm == "seam-1" else "2 3"))
    series = [one for one in series if one.points]
    titles = ("runs spliced into the prompt", KL_TITLE)
    label = f"Isolated against in-context donors, {_dtype_and_source(kept)}"
    drawing = curves(label, _texts(columns), series, _floor(cells, columns), KL, titles)
    title = f"Donors alone against donors in context: {_dtype_and_source(kept)}"
    return Picture(_slug("donors", *_dtype_and_source(kept).split(", ")), title, "Same prompts, same blocks.", drawing)


def scores(cells: Sequence[Cell]) -> Picture | None:
    """Change of score against the full prefill, an interval for each arm and set of questions."""
    kept = [cell for cell in cells if cell.score_change is not None and cell.arm != "full"]
    if not kept:
        return None
    arms = list(dict.fromkeys(cell.arm for cell in kept))
    several = len({(cell.arm, cell.source) for cell in kept}) < len(kept)
    rows = []
    for source in dict.fromkeys(cell.source for cell in kept):
        for cell in (c for c in kept if c.source == source and c.score_change is not None):
            name = f"{source}: {cell.arm}" + (f", {cell.donors.value}" if several and cell.arm not in CONTROLS else "")
            assert cell.score_change is not None
            row = Row(name + UNDECIDED * cell.incompetent, cell.score_change, arms.index(cell.arm) % 6 + 1)
            rows.append(row)
    label = f"Change of score against the full prefill, {kept[0].dtype}"
    note = "Paired by prompt; left of zero is a loss. A dagger marks questions that the model cannot answer anyway."
    drawing = intervals(label, rows, POINTS, "points of score, arm less full prefill")
    return Picture(_slug("scores", kept[0].dtype), f"Change of score: {kept[0].dtype}", note, drawing)


def trade_offs(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Agreement and KL against computed tokens, a point a policy; cells of one dtype, trace and choice of calls."""
    kept = [c for c in cells if (a := c.against_floor) is not None and a.baseline == "exact" and c.arm not in CONTROLS]
    if not kept:
        return
    exact = next((cell for cell in cells if cell.arm == "exact"), None)
    some = f", {kept[0].min_chunk_hit} or more chunk-hit tokens" if kept[0].min_chunk_hit else ", all measured calls"
    about = _dtype_and_source(kept) + some
    kinds: tuple[tuple[str, str, Callable[[Cell], object], Ticks], ...] = (
        ("Top-1 agreement", "top-1", lambda cell: cell.top1, SHARE),
        ("KL", "kl", lambda cell: cell.kl, KL),
    )
    for title, name, of, ticks in kinds:
        shown = [
            Point(cell.arm, against.computed_share.value, of(cell))  # type: ignore[arg-type]
            for cell in kept
            if (against := cell.against_floor) is not None and against.computed_share is not None
        ]
        if not shown:
            continue
        bands = [Band("exact hit (noise floor)", of(exact))] if exact is not None else []  # type: ignore[arg-type]
        titles = ("computed tokens, of those with exact hits", title if ticks is SHARE else KL_TITLE)
        drawing = trade_off(f"{title} against computed tokens, {about}", shown, bands, ticks, titles)
        where = "Up" if ticks is SHARE else "Down"
        note = f"{where} is closer to the full prefill, left computes less. 95 % intervals over sessions."
        if any(cell.undecided for cell in kept) and ticks is SHARE:
            note += f" {UNDECIDED} The model is undecided on most of these calls: see the table."
        file = _slug("cost", name, kept[0].dtype, kept[0].source, str(kept[0].min_chunk_hit or "all"))
        yield Picture(file, f"{title} against computed tokens: {about}", note, drawing)


def _arms(cells: Sequence[Cell], columns: Sequence[int], place: Callable[[Cell], int | None]) -> list[Series]:
    """Curves of the arms that tell most: naive, seams 0, 1, 8 and the longest."""
    seams = {seam for cell in cells if (seam := seam_of(cell.arm)) is not None}
    wanted = ["naive", *(f"seam-{seam}" for seam in sorted(seams & {0, 1, 8} | {max(seams, default=0)}))]
    series = []
    for arm in wanted:
        curve = [(columns.index(where), c.kl) for c in cells if c.arm == arm and (where := place(c)) in columns]
        if curve:
            series.append(Series(arm_name(arm).partition(" (")[0], curve, "6 3" if arm == "naive" else ""))
    return series


def _floor(cells: Sequence[Cell], columns: Sequence[int] | None) -> list[Band]:
    """The noise floor of the place with the highest; none where no exact hit or second full prefill was measured."""
    for arm in ("exact", "retest"):
        found = [c for c in cells if c.arm == arm and (columns is None or c.num_blocks in columns)]
        if found:
            highest = max(found, key=lambda cell: cell.kl.value)
            return [Band(arm_name(arm), highest.kl)]
    return []


def _columns(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.num_blocks for cell in cells if cell.num_blocks is not None})


def _texts(values: Sequence[int]) -> list[str]:
    return [f"{value:,}" for value in values]


def _dtype_and_source(cells: Sequence[Cell]) -> str:
    return f"{cells[0].dtype}, {cells[0].source}"


def _about(cells: Sequence[Cell]) -> str:
    donors = DONORS.get(cells[0].donors, cells[0].donors.value)
    return f"{_dtype_and_source(cells)}, {donors}"


def _label(what: str, cells: Sequence[Cell]) -> str:
    return f"{what}, {_about(cells)}"


def _file(what: str, cells: Sequence[Cell]) -> str:
    return _slug(what, cells[0].dtype, cells[0].source, cells[0].donors.value)


def _slug(*words: str) -> str:
    return "plot-" + "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)
