"""The kinds of picture in a fidelity report: curves with intervals, a trade-off, and intervals in rows.

Owns axes and marks. It must not know cells or experiments: it gets estimates with names. Divergences stand on a
logarithm; what is zero or below its foot stands on a strip of its own under the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pic_bench.report import svg
from pic_bench.report.charts import CHART_STYLE
from pic_bench.report.stats import Estimate

__all__ = ["Band", "Drawing", "Point", "Row", "Series", "Ticks", "curves", "intervals", "trade_off"]

WIDTH = 540.0
RIGHT = WIDTH - 14
# Five decades: a float32 prefix hit differs by 1e-12 and would press everything else together.
DECADES = 5
MARKS = ("dot", "ring", "diamond")
_Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


class Series(NamedTuple):
    """A curve: one estimate at some of the slots."""

    name: str
    points: Sequence[tuple[int, Estimate]]
    dash: str = ""


class Band(NamedTuple):
    """What is drawn across the picture: the noise floor."""

    name: str
    estimate: Estimate


class Point(NamedTuple):
    """A policy in a trade-off."""

    name: str
    x: float
    y: Estimate


class Row(NamedTuple):
    """A named interval."""

    name: str
    estimate: Estimate
    line: int
    """Which of the theme's colours."""


class Ticks(NamedTuple):
    """How the values of an axis are written at its ticks and in tooltips."""

    mark: Callable[[float], str]
    write: Callable[[float], str]
    log: bool


@dataclass(slots=True, frozen=True)
class Drawing:
    """A picture that takes its colours from where it stands."""

    body: str
    height: float
    label: str

    def inline(self) -> str:
        """For a page that has the theme."""
        return svg.document(self.body, WIDTH, self.height, self.label)

    def standalone(self) -> str:
        """A file of its own, with ground and theme, and its label as title."""
        pad, top = 16.0, 54.0
        style = f"<style>{svg.theme('svg')}{CHART_STYLE}</style>"
        ground = svg.rect(0, 0, WIDTH + 2 * pad, self.height + top + 10, "ground", radius=10)
        what, _, about = self.label.partition(", ")
        title = svg.text(pad, 24, what, style="strong") + svg.text(pad, 42, about, style="sub")
        inner = f'<g transform="translate({pad:g},{top:g})">{self.body}</g>'
        return svg.document(style + ground + title + inner, WIDTH + 2 * pad, self.height + top + 10, self.label)


class _Axis:
    """A vertical axis; on a logarithm, with a strip under it for what is too small, if there is anything."""

    def __init__(self, estimates: Iterable[Estimate], ticks: Ticks, top: float, bottom: float) -> None:
        values = [v for e in estimates for v in (e.value, e.low, e.high)]
        self.ticks, self.bottom, self.strip = ticks, bottom, ""
        if not ticks.log:
            low, high = min(values), max(values)
            room = (high - low) * 0.06 or 0.01
            self.scale = svg.Scale(max(low - room, 0.0) if low >= 0 else low - room, high + room, bottom, top)
            return
        largest = max([v for v in values if v > 0], default=1.0)
        foot = largest * 10.0**-DECADES
        low = min([v for v in values if v >= foot], default=largest / 10) / 1.3
        small = [v for v in values if v < low]
        if small:
            self.strip = "0" if all(v <= 0 for v in small) else f"< {ticks.mark(10.0 ** math.floor(math.log10(low)))}"
            low = 10.0 ** math.floor(math.log10(low))
        self.scale = svg.Scale(low, max(largest * 1.3, low * 10), bottom - (24 if small else 0), top, log=True)

    def __call__(self, value: float) -> float:
        if self.ticks.log and value < self.scale.low:
            return self.bottom - 6
        return self.scale(value)

    def draw(self, left: float) -> list[str]:
        parts = []
        scale = self.scale
        marks = svg.log_ticks(scale.low, scale.high) if self.ticks.log else _linear(scale.low, scale.high)
        for tick in marks:
            parts.append(svg.line(left, self(tick), RIGHT, self(tick)))
            parts.append(svg.text(left - 8, self(tick) + 4, self.ticks.mark(tick), style="small", anchor="end"))
        if self.strip:
            parts.append(svg.rect(left, self.bottom - 15, RIGHT - left, 17, "panel", radius=3))
            parts.append(svg.text(left - 8, self.bottom - 2, self.strip, style="small", anchor="end"))
        return parts


def curves(
    label: str,
    slots: Sequence[str],
    series: Sequence[Series],
    bands: Sequence[Band],
    ticks: Ticks,
    titles: tuple[str, str],
) -> Drawing:
    """Curves over evenly spaced slots, whiskers at every point, the floor as a band; `titles` are of x and y."""
    left, height = 62.0, 340.0
    legend, rows = _legend([*((s.name, s.dash) for s in series), *((band.name, "band") for band in bands)], left)
    top, bottom = 22.0 + 20.0 * rows, height - 46
    axis = _Axis([e for s in series for _, e in s.points] + [band.estimate for band in bands], ticks, top, bottom)
    parts = [legend, svg.text(left - 56, top - 8, titles[1], style="small"), *axis.draw(left)]
    xs = svg.Scale(0, max(1, len(slots) - 1), left + 34, RIGHT - 30)
    for band in bands:
        parts += _band(band, axis, left)
    for slot, name in enumerate(slots):
        parts.append(svg.text(xs(slot), bottom + 19, name, style="small", anchor="middle"))
    parts.append(svg.text((left + RIGHT) / 2, bottom + 38, titles[0], style="small", anchor="middle"))
    for number, one in enumerate(series):
        # Whiskers of several curves at one slot stand beside each other.
        aside = (number - (len(series) - 1) / 2) * min(7.0, 44.0 / len(series))
        colour = f"line-{number % 6 + 1}"
        places = [(xs(slot) + aside, estimate) for slot, estimate in one.points]
        if len(places) > 1:
            parts.append(svg.polyline([(x, axis(e.value)) for x, e in places], colour, dash=one.dash))
        for slot, (x, estimate) in zip((slot for slot, _ in one.points), places, strict=True):
            tip = f"{one.name}, {slots[slot]}: {_says(estimate, ticks)}"
            parts += _whisker(x, axis, estimate, colour, MARKS[number % 3], tip)
    return Drawing("".join(parts), height, label)


def trade_off(
    label: str, points: Sequence[Point], bands: Sequence[Band], ticks: Ticks, titles: tuple[str, str]
) -> Drawing:
    """Named points with whiskers over a share, the floor as a band."""
    left, height = 62.0, 360.0
    legend, rows = _legend([(band.name, "band") for band in bands], left)
    top, bottom = 22.0 + 20.0 * rows, height - 46
    axis = _Axis([p.y for p in points] + [band.estimate for band in bands], ticks, top, bottom)
    parts = [legend, svg.text(left - 56, top - 8, titles[1], style="small"), *axis.draw(left)]
    for band in bands:
        parts += _band(band, axis, left)
    values = [p.x for p in points]
    room = (max(values) - min(values)) * 0.12 or 0.05
    xs = svg.Scale(max(0.0, min(values) - room), max(values) + room, left + 8, RIGHT - 8)
    for tick in _linear(xs.low, xs.high):
        parts.append(svg.line(xs(tick), bottom, xs(tick), bottom + 4, style="axis"))
        parts.append(svg.text(xs(tick), bottom + 19, f"{tick * 100:g} %", style="small", anchor="middle"))
    parts.append(svg.text((left + RIGHT) / 2, bottom + 38, titles[0], style="small", anchor="middle"))
    # A name must not cover a mark or another name, and should not cover a whisker.
    marks = [(xs(p.x) - 6, axis(p.y.value) - 6, xs(p.x) + 6, axis(p.y.value) + 6) for p in points]
    whiskers = [(xs(p.x) - 2, axis(p.y.high), xs(p.x) + 2, axis(p.y.low)) for p in points]
    # A name has its mark's colour, for where marks crowd; the sixth is the band's.
    colours = [f"line-{number % 5 + 1}" for number in range(len(points))]
    for number, (point, colour) in enumerate(zip(points, colours, strict=True)):
        tip = f"{point.name}: {point.x:.1%} computed, {_says(point.y, ticks)}"
        parts += _whisker(xs(point.x), axis, point.y, colour, MARKS[number % 3], tip)
    frame = (left, top, RIGHT, bottom)
    for point, colour in zip(points, colours, strict=True):
        text, box = _name(point.name, colour, (xs(point.x), axis(point.y.value)), marks, whiskers, frame)
        parts.append(text)
        marks.append(box)
    return Drawing("".join(parts), height, label)


def intervals(label: str, rows: Sequence[Row], ticks: Ticks, title: str) -> Drawing:
    """Intervals of differences in rows, with a line at zero."""
    left, step, top = 236.0, 26.0, 8.0
    bottom = top + step * len(rows)
    values = [v for row in rows for v in (row.estimate.low, row.estimate.high)]
    room = (max(0.0, *values) - min(0.0, *values)) * 0.06 or 0.01
    xs = svg.Scale(min(0.0, *values) - room, max(0.0, *values) + room, left, RIGHT)
    parts = []
    for tick in _linear(xs.low, xs.high):
        parts.append(svg.line(xs(tick), top, xs(tick), bottom))
        parts.append(svg.text(xs(tick), bottom + 18, ticks.mark(tick), style="small", anchor="middle"))
    parts.append(svg.line(xs(0.0), top, xs(0.0), bottom, style="unit"))
    for number, row in enumerate(rows):
        y, colour = top + step * (number + 0.5), f"line-{row.line}"
        parts.append(svg.text(left - 10, y + 4, row.name, style="small", anchor="end"))
        parts.append(svg.polyline([(xs(row.estimate.low), y), (xs(row.estimate.high), y)], colour, width=1.6))
        tip = f"{row.name}: {_says(row.estimate, ticks)}"
        parts.append(svg.shape("dot", xs(row.estimate.value), y, 4.2, colour, title=tip))
    parts.append(svg.text((left + RIGHT) / 2, bottom + 38, title, style="small", anchor="middle"))
    return Drawing("".join(parts), bottom + 48, label)


def _whisker(x: float, axis: _Axis, estimate: Estimate, colour: str, mark: str, tip: str) -> list[str]:
    low, high = axis(estimate.low), axis(estimate.high)
    return [
        svg.polyline([(x, low), (x, high)], colour, width=1.4),
        svg.shape(mark, x, axis(estimate.value), 4.2, colour, title=tip),
    ]


def _band(band: Band, axis: _Axis, left: float) -> list[str]:
    low, high, middle = (axis(v) for v in (band.estimate.low, band.estimate.high, band.estimate.value))
    tip = f"{band.name}: {_says(band.estimate, axis.ticks)}"
    # A floor with no width, such as exact zeros, is still to be seen.
    tall = max(low - high, 3.0)
    return [
        svg.rect(left, min(high, middle - 1.5), RIGHT - left, tall, "line-6", title=tip, opacity=0.28),
        svg.polyline([(left, middle), (RIGHT, middle)], "line-6", dash="6 4", width=1.4),
    ]


def _legend(names: Sequence[tuple[str, str]], left: float) -> tuple[str, int]:
    """A sample and a name for each, wrapped to the width; returns the number of rows."""
    parts, x, row = [], left, 0
    for number, (name, dash) in enumerate(names):
        needed = 46 + 6.7 * len(name)
        if x + needed > RIGHT + 16 and x > left:
            x, row = left, row + 1
        y = 10.0 + 20.0 * row
        if dash == "band":
            parts.append(svg.rect(x, y - 6, 24, 12, "line-6", opacity=0.28))
            parts.append(svg.polyline([(x, y), (x + 24, y)], "line-6", dash="6 4", width=1.4))
        else:
            colour = f"line-{number % 6 + 1}"
            parts.append(svg.polyline([(x, y), (x + 24, y)], colour, dash=dash))
            parts.append(svg.shape(MARKS[number % 3], x + 12, y, 4.2, colour))
        parts.append(svg.text(x + 30, y + 4, name))
        x += needed
    return "".join(parts), row + 1


def _name(
    name: str, colour: str, at: tuple[float, float], marks: Sequence[_Box], whiskers: Sequence[_Box], frame: _Box
) -> tuple[str, _Box]:
    """A name beside its mark, at the place where it covers least, and the box it takes."""
    (x, y), wide = at, 7.2 * len(name)
    right, left = x + 9, x - 9 - wide
    places = [(at, y + down) for down in (4, -10, 18, -26, 34) for at in (right, left)]
    boxes = {(at, base): (at, base - 11, at + wide, base + 3) for at, base in places}

    def cost(place: tuple[float, float]) -> int:
        box = boxes[place]
        inside = box[0] >= frame[0] and box[1] >= frame[1] - 6 and box[2] <= frame[2] and box[3] <= frame[3] + 2
        covered = 10 * sum(_overlap(box, mark) for mark in marks) + sum(_overlap(box, other) for other in whiskers)
        return covered + 100 * (not inside)

    best = min(places, key=cost)
    look = f'style="paint-order:stroke;stroke:var(--ground);stroke-width:3px;fill:var(--{colour})"'
    return svg.text(*best, name).replace("<text ", f"<text {look} ", 1), boxes[best]


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _linear(low: float, high: float, most: int = 6) -> list[float]:
    """Round ticks inside `[low, high]`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    first = math.ceil(low / step - 1e-9)
    # Rounded, so that a tick at zero is written as zero.
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _says(estimate: Estimate, ticks: Ticks) -> str:
    bounds = f"[{ticks.write(estimate.low)}, {ticks.write(estimate.high)}]"
    return f"{ticks.write(estimate.value)} {bounds}, n = {estimate.n}"
