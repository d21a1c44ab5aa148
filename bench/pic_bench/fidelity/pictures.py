"""The pictures of a fidelity report: what is drawn against what, chosen from the cells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from matplotlib.axes import Axes

from pic_bench.fidelity.record import Donors
from pic_bench.fidelity.summary import CONTROLS, Cell
from pic_bench.fidelity.tables import COMPILED, UNDECIDED, arm_name
from pic_bench.report.figures import LINES, Drawing, colour, drawing, place
from pic_bench.report.numbers import divergence, plural, points, share, tick
from pic_bench.report.stats import Estimate

WIDTH = 540.0
KL = "mean KL of the first token, nats"
RUNS = "runs spliced into the prompt"
RECOVERY = "mean recovery"
SCORE = "points of score, arm less full prefill"
MARKS = "oDs"
FLOOR = "line-6"
# A float32 prefix hit differs by 1e-12 and would press everything else together.
DECADES = 5
_DASHES = {"naive": "--"}
_NOTHING = Estimate(value=0.0, low=0.0, high=0.0, n=0)
DONORS = {Donors.ISOLATED: "donors alone", Donors.CONTEXT: "donors in context"}


class Picture(NamedTuple):
    """A drawing with the words around it; `name` is the stem of its file."""

    name: str
    title: str
    note: str
    drawing: Drawing


class Curve(NamedTuple):
    """A named line of estimates, each at a slot or share of the horizontal axis."""

    name: str
    points: Sequence[tuple[float, Estimate]]
    dash: str = "-"


def by_seam(cells: Sequence[Cell]) -> Picture | None:
    """KL against seam tokens, a curve for each number of runs; cells of one dtype, data and kind of donors."""
    blocks = _values([cell for cell in cells if cell.seam is not None], "num_blocks")
    curves = {plural(number, "run"): [cell for cell in cells if cell.num_blocks == number] for number in blocks}
    floor = _floor([cell for cell in cells if cell.num_blocks == blocks[-1]]) if blocks else {}
    note = "A curve for each number of runs, with 95 % intervals over prompts; naive is in the next picture."
    return _curves("KL against seam tokens", curves, "seam", floor, "seam tokens", note)


def by_runs(cells: Sequence[Cell]) -> Picture | None:
    """KL against the number of runs, a curve for each of a few arms."""
    note = "Naive is spliced without rotation."
    return _curves("KL against number of runs", _arms(cells), "num_blocks", _floor(cells), RUNS, note)


def by_shift(cells: Sequence[Cell]) -> Picture | None:
    """KL against how far a block was moved."""
    note = "One block, moved; rotated and not rotated."
    return _curves("KL against shift", _arms(cells), "shift", _floor(cells), "positions moved", note)


def scores(cells: Sequence[Cell]) -> Picture | None:
    """Change of score against the full prefill, for each arm and set of questions; cells of one dtype."""
    kept = [(cell, change) for cell in cells if (change := cell.score_change) is not None and cell.arm != "full"]
    if not kept:
        return None
    arms = list(dict.fromkeys(cell.arm for cell, _ in kept))
    series = []
    for source in dict.fromkeys(cell.source for cell, _ in kept):
        some = [(cell, change) for cell, change in kept if cell.source == source]
        name = source + UNDECIDED * any(cell.incompetent for cell, _ in some)
        series.append(Curve(name, [(arms.index(cell.arm), change) for cell, change in some], "none"))
    title = f"Change of score: {kept[0][0].dtype}"
    note = "Paired by prompt; below zero is a loss. A dagger marks questions that the model cannot answer anyway."
    drawn = plot(title, series, {"full prefill": _NOTHING}, "arm", y_title=SCORE, slots=arms)
    return Picture(slug("scores", kept[0][0].dtype), title, note, drawn)


def trade_offs(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Agreement and KL against computed tokens, a point a policy; cells of one dtype, trace and choice of calls."""
    kept = [(c, s.value) for c in cells if (s := c.share_of_exact) is not None and c.arm not in CONTROLS]
    if not kept:
        return
    first = kept[0][0]
    some = f"{first.min_chunk_hit} or more chunk-hit tokens" if first.min_chunk_hit else "all measured calls"
    exact = [cell for cell in cells if cell.arm == "exact"][:1]
    for what, closer, y_title in (("Top-1 agreement", "Up", "Top-1 agreement"), ("KL", "Down", KL)):
        field = "kl" if y_title == KL else "top1"
        band = {arm_name(cell.arm): getattr(cell, field) for cell in exact}
        series = [Curve(cell.arm, [(computed, getattr(cell, field))], "none") for cell, computed in kept]
        title = f"{what} against computed tokens: {_dtype_and_source(first)}, {some}"
        drawn = plot(title, series, band, "computed tokens, of those with exact hits", y_title=y_title)
        note = f"{closer} is closer to the full prefill, left computes less. 95 % intervals over sessions."
        if field == "top1" and any(cell.undecided for cell, _ in kept):
            note += f" {UNDECIDED} The model is undecided on most of these calls: see the table."
        words = ("cost", what.removesuffix(" agreement"), first.dtype, first.source, str(first.min_chunk_hit or "all"))
        yield Picture(slug(*words), title, note, drawn)


def by_skills(cells: Sequence[Cell]) -> Picture:
    """KL against the number of skills: a curve for each way to compile them, with no seam and with the longest."""
    kept = [cell for cell in cells if cell.donors in COMPILED]
    counts, seams = _values(kept, "num_blocks"), _values(kept, "seam")
    curves = []
    for donors, compiled in COMPILED.items():
        for seam, dash in sorted({seams[0]: "--", seams[-1]: "-"}.items()):
            some = [cell for cell in kept if cell.donors is donors and cell.seam == seam]
            if points := [(counts.index(cell.num_blocks or 0), cell.kl) for cell in some]:
                curves.append(Curve(f"{compiled}, seam {seam}", points, dash))
    # One skill behind its own system prompt is an exact hit, which would press everything else together.
    exact = {arm_name(cell.arm): cell.kl for cell in cells if cell.arm == "exact" and cell.num_blocks == counts[-1]}
    title = f"KL against number of skills: {_dtype_and_source(kept[0])}"
    drawn = plot(title, curves, exact, "skills composed", slots=counts)
    note = "Skills compiled alone behind the system prompt, or together in one pass; 95 % intervals over libraries."
    if any(cell.undecided for cell in kept):
        note += f" {UNDECIDED} in the table: the model is undecided."
    return Picture(slug("skills", kept[0].dtype, kept[0].source), title, note, drawn)


def plot(
    title: str,
    series: Sequence[Curve],
    floor: Mapping[str, Estimate],
    x_title: str,
    *,
    y_title: str = KL,
    slots: Sequence[object] | None = None,
) -> Drawing:
    """Estimates with whiskers and tooltips, the floor as a band, and a legend.

    Args:
        slots: what stands at 0, 1, 2, ... of the horizontal axis; None where it is a share.
    """
    write = {KL: divergence, SCORE: points, RECOVERY: "{:.2f}".format}.get(y_title, share)
    labels = [f"{slot:,}" if isinstance(slot, int) else str(slot) for slot in slots or ()]
    rows = math.ceil((len(series) + len(floor)) / 3)
    height = 344.0 + 18 * rows
    with drawing(title, WIDTH, height) as (drawn, figure):
        axes = place(figure, left=62, top=44 + 18 * rows, right=14, bottom=46)
        for name, estimate in floor.items():
            band = axes.axhspan(estimate.low, estimate.high, color=colour(FLOOR), alpha=0.28, linewidth=0)
            band.set_url(f"{name}: {_says(estimate, write)}")
            axes.axhline(estimate.value, color=colour(FLOOR), linestyle="--", linewidth=1.4, label=name)
        for number, (name, curve, dash) in enumerate(series):
            # Whiskers of several curves at one slot stand beside each other.
            aside = (number - (len(series) - 1) / 2) * min(0.07, 0.5 / len(series)) if slots else 0.0
            xs, found = [x + aside for x, _ in curve], [estimate for _, estimate in curve]
            line, mark, values = colour(LINES[number % 5]), MARKS[number % 3], [estimate.value for estimate in found]
            axes.vlines(xs, [e.low for e in found], [e.high for e in found], color=line, linewidth=1.4)
            axes.plot(xs, values, color=line, linestyle=dash, linewidth=2)
            axes.plot([], [], color=line, linestyle=dash, linewidth=2, marker=mark, label=name)
            marks = axes.scatter(xs, values, s=40, color=line, marker=mark, zorder=3)
            places = [labels[int(x)] if slots else f"{x:.1%} computed" for x, _ in curve]
            marks.set_urls([f"{name}, {at}: {_says(e, write)}" for at, e in zip(places, found, strict=True)])
        if y_title == KL:
            _log_axis(axes, [estimate for one in series for _, estimate in one.points] + list(floor.values()))
        elif y_title != RECOVERY:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}" + (" %" if write is share else ""))
        if slots:
            axes.set(xticks=range(len(labels)), xticklabels=labels, xlim=(-0.45, len(labels) - 0.55))
        else:
            axes.margins(x=0.12)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value * 100:g} %")
        axes.set_xlabel(x_title)
        axes.set_title(y_title, fontsize=12, fontweight="normal", color=colour("muted"), pad=12, x=-0.12)
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(-0.12, 1.1), fontsize=11)
    return drawn


def slug(*words: str) -> str:
    """The stem of a picture's file."""
    return "plot-" + "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)


def _log_axis(axes: Axes, estimates: Sequence[Estimate]) -> None:
    """Divergences on a logarithm; what is zero, or far below the rest, stands on a strip at the foot."""
    values = [value for e in estimates for value in (e.value, e.low, e.high)]
    largest = max([value for value in values if value > 0], default=1.0)
    lowest = min([value for value in values if value >= largest * 10.0**-DECADES], default=largest / 10)
    foot = 10.0 ** math.floor(math.log10(lowest))
    small = [value for value in values if value < foot]
    powers = range(round(math.log10(foot)), math.ceil(math.log10(largest)) + 1)
    steps = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) == 4 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    if small:
        axes.set_yscale("symlog", linthresh=foot, linscale=0.25)
        strip = "0" if all(value <= 0 for value in small) else f"< {tick(foot)}"
        axes.set_yticks([0, *ticks], [strip, *map(tick, ticks)])
        axes.set_ylim(-foot / 4, largest * 1.4)
    else:
        axes.set_yscale("log")
        axes.set_yticks(ticks, list(map(tick, ticks)))
        axes.set_ylim(lowest / 1.3, largest * 1.3)
    axes.set_yticks([], minor=True)


def _arms(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of the arms that tell most: naive, seams 0, 1, 8 and the longest."""
    seams = _values(cells, "seam")
    wanted = ["naive", *(f"seam-{seam}" for seam in seams if seam in (0, 1, 8, seams[-1]))]
    found = {arm_name(arm).partition(" (")[0]: [cell for cell in cells if cell.arm == arm] for arm in wanted}
    return {name: some for name, some in found.items() if some}


def _floor(cells: Sequence[Cell]) -> dict[str, Estimate]:
    """The noise floor of the place with the highest; none where no exact hit or second full prefill was measured."""
    for arm in ("exact", "retest"):
        if found := [cell.kl for cell in cells if cell.arm == arm]:
            return {arm_name(arm): max(found, key=lambda kl: kl.value)}
    return {}


def _curves(
    what: str, curves: Mapping[str, Sequence[Cell]], at: str, floor: Mapping[str, Estimate], axis: str, note: str
) -> Picture | None:
    """Curves of cells of one dtype, data and kind of donors, by their field `at`; None of a single slot."""
    slots = _values(chain(*curves.values()), at)
    if len(slots) < 2:
        return None
    series = []
    for name, some in curves.items():
        points = [(slots.index(x), cell.kl) for cell in some if (x := getattr(cell, at)) is not None]
        series.append(Curve(name, points, _DASHES.get(name, "-")))
    cell = next(cell for some in curves.values() for cell in some if cell.arm not in CONTROLS)
    title = f"{what}: {_dtype_and_source(cell)}, {DONORS.get(cell.donors, cell.donors.value)}"
    name = what.replace("against", "by").replace("number of ", "").replace(" tokens", "")
    drawn = plot(title, series, floor, axis, slots=slots)
    return Picture(slug(name, cell.dtype, cell.source, cell.donors.value), title, note, drawn)


def _values(cells: Iterable[Cell], field: str) -> list[int]:
    return sorted({value for cell in cells if (value := getattr(cell, field)) is not None})


def _dtype_and_source(cell: Cell) -> str:
    return f"{cell.dtype}, {cell.source}"


def _says(estimate: Estimate, write: Callable[[float], str]) -> str:
    return f"{write(estimate.value)} [{write(estimate.low)}, {write(estimate.high)}], n = {estimate.n}"
