"""The pictures of a fidelity report: KL against cost, and recovery against cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pic_bench.fidelity.compared import GATED
from pic_bench.fidelity.record import Experiment
from pic_bench.fidelity.summary import CONTROLS, Cell
from pic_bench.fidelity.tables import arm_name
from pic_bench.report.figures import LINES, Drawing, colour, drawing, log_ticks, place
from pic_bench.report.numbers import divergence, tick, two
from pic_bench.report.stats import Estimate

WIDTH = 540.0
KL = "mean KL of the first token, nats"
RECOVERY = "mean recovery"
MARKS = "oDs"
FLOOR = "line-6"
DECADES = 5
"""Of KL that are shown: a float32 prefix hit differs by 1e-12, and would press everything else together."""
_FOOT = "95 % intervals; what lies five decades below the largest KL stands at the foot."


class Picture(NamedTuple):
    """A drawing with the words around it; `name` is the stem of its file."""

    name: str
    title: str
    note: str
    drawing: Drawing


class Curve(NamedTuple):
    """A named line of estimates, each at a share of the horizontal axis."""

    name: str
    points: Sequence[tuple[float, Estimate]]
    dash: str = "-"


def pictures_of(cells: Sequence[Cell], where: str) -> Iterator[Picture]:
    """What is drawn of cells of one experiment, number format, data and kind of donors; nothing of controls alone."""
    experiment = cells[0].experiment
    if all(cell.arm in CONTROLS for cell in cells):
        return
    if experiment in (Experiment.TRACE, Experiment.EDITS):
        some = [cell for cell in cells if cell.group in ("", GATED)]
        yield from (_by_cost(some, what, where) for what in ("kl", "recovery") if any(getattr(c, what) for c in some))


def _by_cost(cells: Sequence[Cell], what: str, where: str) -> Picture:
    """A point for each policy, at the share of its prompts that is computed."""
    found: list[tuple[Cell, Estimate]] = [(cell, one) for cell in cells if (one := getattr(cell, what)) is not None]
    series = [
        Curve(arm_name(cell.arm), [(cell.computed_tokens / cell.prompt_tokens, one)], "none")
        for cell, one in found
        if cell.arm not in CONTROLS
    ]
    floor = _floor(cells) if what == "kl" else {arm_name(c.arm): one for c, one in found if c.arm == "full"}
    word, closer, y_title = ("KL", "Down", KL) if what == "kl" else ("Recovery", "Up", RECOVERY)
    title = f"{word} against cost: {where}"
    drawn = plot(title, series, floor, "share of the prompt that is computed", y_title=y_title)
    note = f"{closer} is closer to the full prefill, left computes less. {_FOOT if what == 'kl' else '95 % intervals.'}"
    return Picture(slug(word, "by-cost", where), title, note, drawn)


def plot(
    title: str,
    series: Sequence[Curve],
    floor: Mapping[str, Estimate],
    x_title: str,
    *,
    y_title: str = KL,
    done: str = "computed",
) -> Drawing:
    """Estimates with whiskers and tooltips, the floor as a band, and a legend.

    Args:
        y_title: of a divergence, on a logarithm, or `RECOVERY`.
        done: to the share of the prompt that stands on the horizontal axis.
    """
    is_kl = y_title != RECOVERY
    write = divergence if is_kl else two
    every = [estimate for curve in series for _, estimate in curve.points] + list(floor.values())
    bounds = [value for e in every for value in (e.value, e.low, e.high)]
    largest = max([value for value in bounds if value > 0], default=1.0)
    foot = min(value for value in (*bounds, largest) if value >= largest * 10.0**-DECADES) / 2

    def at(*values: float) -> list[float]:
        return [max(value, foot) if is_kl else value for value in values]

    rows = math.ceil((len(series) + len(floor)) / 3)
    with drawing(title, WIDTH, 344.0 + 18 * rows) as (drawn, figure):
        axes = place(figure, left=62, top=44 + 18 * rows, right=14, bottom=46)
        for name, estimate in floor.items():
            band = axes.axhspan(*at(estimate.low, estimate.high), color=colour(FLOOR), alpha=0.28, linewidth=0)
            band.set_url(f"{name}: {_says(estimate, write)}")
            axes.axhline(*at(estimate.value), color=colour(FLOOR), linestyle="--", linewidth=1.4)
            axes.plot([], [], color=colour(FLOOR), linestyle="--", label=f"{name}: {write(estimate.value)}")
        for number, (name, curve, dash) in enumerate(series):
            xs, found = [x for x, _ in curve], [estimate for _, estimate in curve]
            line, mark, values = colour(LINES[number % 5]), MARKS[number % 3], at(*(e.value for e in found))
            axes.vlines(xs, at(*(e.low for e in found)), at(*(e.high for e in found)), color=line, linewidth=1.4)
            axes.plot(xs, values, color=line, linestyle=dash, linewidth=2)
            axes.plot([], [], color=line, linestyle=dash, linewidth=2, marker=mark, label=name)
            marks = axes.scatter(xs, values, s=40, color=line, marker=mark, zorder=3)
            marks.set_urls([f"{name}, {x:.1%} {done}: {_says(e, write)}" for x, e in zip(xs, found, strict=True)])
        if is_kl:
            axes.set_ylim(foot / 1.3, largest * 1.3)
            log_ticks(axes, "y", tick)
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * 100:g} %")
        axes.set_xlabel(x_title)
        axes.set_title(y_title, fontsize=12, fontweight="normal", color=colour("muted"), pad=12, x=-0.12)
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(-0.12, 1.1), fontsize=11)
    return drawn


def slug(*words: str) -> str:
    """The stem of a picture's file."""
    return "plot-" + "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)


def _floor(cells: Sequence[Cell]) -> dict[str, Estimate]:
    """The noise floor; none where no exact hit or second full prefill was measured."""
    kls = {cell.arm: cell.kl for cell in cells}
    return next(({arm_name(arm): kls[arm]} for arm in ("exact", "retest") if arm in kls), {})


def _says(estimate: Estimate, write: Callable[[float], str]) -> str:
    return f"{write(estimate.value)} [{write(estimate.low)}, {write(estimate.high)}], n = {estimate.n}"
