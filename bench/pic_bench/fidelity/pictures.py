"""The pictures of a fidelity report: what is drawn against what, chosen from the cells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from pic_bench.fidelity.record import Donors
from pic_bench.fidelity.summary import CONTROLS, Cell, seam_of
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
    blocks = _values((cell for cell in cells if seam_of(cell.arm) is not None), _num_blocks)
    curves = {plural(number, "run"): [cell for cell in cells if cell.num_blocks == number] for number in blocks}
    floor = _floor([cell for cell in cells if cell.num_blocks == blocks[-1]]) if blocks else {}
    note = "A curve for each number of runs, with 95 % intervals over prompts; naive is in the next picture."
    return _picture("KL against seam tokens", curves, lambda cell: seam_of(cell.arm), floor, "seam tokens", note)


def by_runs(cells: Sequence[Cell]) -> Picture | None:
    """KL against the number of runs, a curve for each of a few arms."""
    floor = _floor([cell for cell in cells if cell.num_blocks is not None])
    note = "Naive is spliced without rotation."
    return _picture("KL against number of runs", _arms(cells), _num_blocks, floor, RUNS, note)


def by_shift(cells: Sequence[Cell]) -> Picture | None:
    """KL against how far a block was moved."""
    note = "One block, moved; rotated and not rotated."
    floor = _floor(cells)
    return _picture("KL against shift", _arms(cells), lambda cell: cell.shift, floor, "positions moved", note)


def scores(cells: Sequence[Cell]) -> Picture | None:
    """Change of score against the full prefill, for each arm and set of questions; cells of one dtype."""
    kept = [cell for cell in cells if cell.score_change is not None and cell.arm != "full"]
    if not kept:
        return None
    arms = list(dict.fromkeys(cell.arm for cell in kept))
    series = []
    for source in dict.fromkeys(cell.source for cell in kept):
        some = [cell for cell in kept if cell.source == source]
        points = [(arms.index(cell.arm), cell.score_change) for cell in some if cell.score_change is not None]
        series.append(Curve(source + UNDECIDED * any(cell.incompetent for cell in some), points, "none"))
    title = f"Change of score: {kept[0].dtype}"
    drawn = plot(title, series, {"full prefill": _NOTHING}, "arm", y_title=SCORE, slots=arms)
    note = "Paired by prompt; below zero is a loss. A dagger marks questions that the model cannot answer anyway."
    return Picture(slug("scores", kept[0].dtype), title, note, drawn)


def trade_offs(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Agreement and KL against computed tokens, a point a policy; cells of one dtype, trace and choice of calls."""
    shares = {
        cell.arm: against.computed_share.value
        for cell in cells
        if (against := cell.against_floor) is not None
        and against.baseline == "exact"
        and against.computed_share is not None
        and cell.arm not in CONTROLS
    }
    kept = [cell for cell in cells if cell.arm in shares]
    if not kept:
        return
    some = f", {kept[0].min_chunk_hit} or more chunk-hit tokens" if kept[0].min_chunk_hit else ", all measured calls"
    about = _dtype_and_source(kept) + some
    exact = [cell for cell in cells if cell.arm == "exact"]
    for what, name in (("Top-1 agreement", "top-1"), ("KL", "kl")):
        is_share = name == "top-1"
        band = {arm_name(cell.arm): cell.top1 if is_share else cell.kl for cell in exact[:1]}
        series = [Curve(c.arm, [(shares[c.arm], c.top1 if is_share else c.kl)], "none") for c in kept]
        title = f"{what} against computed tokens: {about}"
        axis = "computed tokens, of those with exact hits"
        drawn = plot(title, series, band, axis, y_title=what if is_share else KL)
        note = f"{'Up' if is_share else 'Down'} is closer to the full prefill, left computes less. "
        note += "95 % intervals over sessions."
        if is_share and any(cell.undecided for cell in kept):
            note += f" {UNDECIDED} The model is undecided on most of these calls: see the table."
        file = slug("cost", name, kept[0].dtype, kept[0].source, str(kept[0].min_chunk_hit or "all"))
        yield Picture(file, title, note, drawn)


def by_skills(cells: Sequence[Cell]) -> Picture:
    """KL against the number of skills: a curve for each way to compile them, with no seam and with the longest."""
    kept = [cell for cell in cells if cell.donors in COMPILED]
    counts = _values(kept, _num_blocks)
    seams = {seam for cell in kept if (seam := seam_of(cell.arm)) is not None}
    curves = []
    for donors, compiled in COMPILED.items():
        for seam, dash in sorted({min(seams): "--", max(seams): "-"}.items()):
            some = [cell for cell in kept if cell.donors is donors and seam_of(cell.arm) == seam]
            points = [(counts.index(cell.num_blocks or 0), cell.kl) for cell in some]
            if points:
                curves.append(Curve(f"{compiled}, seam {seam}", points, dash))
    # One skill behind its own system prompt is an exact hit, which would press everything else together.
    exact = {arm_name(cell.arm): cell.kl for cell in cells if cell.arm == "exact" and cell.num_blocks == counts[-1]}
    title = f"KL against number of skills: {_dtype_and_source(kept)}"
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
    seams = {seam for cell in cells if (seam := seam_of(cell.arm)) is not None}
    wanted = ["naive", *(f"seam-{seam}" for seam in sorted(seams & {0, 1, 8} | {max(seams, default=0)}))]
    found = {arm_name(arm).partition(" (")[0]: [cell for cell in cells if cell.arm == arm] for arm in wanted}
    return {name: some for name, some in found.items() if some}


def _floor(cells: Sequence[Cell]) -> dict[str, Estimate]:
    """The noise floor of the place with the highest; none where no exact hit or second full prefill was measured."""
    for arm in ("exact", "retest"):
        if found := [cell.kl for cell in cells if cell.arm == arm]:
            return {arm_name(arm): max(found, key=lambda kl: kl.value)}
    return {}


def _picture(
    what: str,
    curves: Mapping[str, Sequence[Cell]],
    at: Callable[[Cell], int | None],
    floor: Mapping[str, Estimate],
    axis: str,
    note: str,
) -> Picture | None:
    """Curves of cells of one dtype, data and kind of donors; None of a single slot."""
    slots = _values((cell for some in curves.values() for cell in some), at)
    if len(slots) < 2:
        return None
    series = [
        Curve(name, [(slots.index(x), cell.kl) for cell in some if (x := at(cell)) is not None], _DASHES.get(name, "-"))
        for name, some in curves.items()
    ]
    cell = next(cell for some in curves.values() for cell in some if cell.arm not in CONTROLS)
    title = f"{what}: {_dtype_and_source([cell])}, {DONORS.get(cell.donors, cell.donors.value)}"
    name = what.replace("against", "by").replace("number of ", "").replace(" tokens", "")
    drawn = plot(title, series, floor, axis, slots=slots)
    return Picture(slug(name, cell.dtype, cell.source, cell.donors.value), title, note, drawn)


def _values(cells: Iterable[Cell], at: Callable[[Cell], int | None]) -> list[int]:
    return sorted({value for cell in cells if (value := at(cell)) is not None})


def _num_blocks(cell: Cell) -> int | None:
    return cell.num_blocks


def _dtype_and_source(cells: Sequence[Cell]) -> str:
    return f"{cells[0].dtype}, {cells[0].source}"


def _says(estimate: Estimate, write: Callable[[float], str]) -> str:
    return f"{write(estimate.value)} [{write(estimate.low)}, {write(estimate.high)}], n = {estimate.n}"
