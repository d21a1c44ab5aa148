"""Owns the drawing primitives: escaped SVG elements, linear and logarithmic scales, ticks, number formats.

It must not know what is drawn. Colours are CSS variables (`theme`), so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = [
    "Scale",
    "count",
    "document",
    "line",
    "log_ticks",
    "percent",
    "polyline",
    "rect",
    "seconds",
    "shape",
    "text",
    "theme",
    "times",
]

# Blue, orange, green and purple of the Okabe-Ito palette (distinct under the common colour blindnesses), with greys
# for what is computed and for stock; `line-1` to `line-6` tell curves apart. Dark variants keep hue and order, at a
# contrast of 3:1 or more on the ground.
_LIGHT = """--ground:#ffffff;--panel:#f6f7f9;--ink:#1c2430;--muted:#5b6675;--rule:#d9dee5;--accent:#0072b2;
--prefix:#0072b2;--chunk:#e69f00;--computed:#c3cad3;--on-prefix:#ffffff;--on-chunk:#221800;--on-computed:#1c2430;
--stock:#5b6675;--stock-again:#8b96a5;--stock-cold:#7a6f5d;--pic:#009e73;--pic-off:#b8578f;--differs:#fbe3c0;--good:#00704f;
--line-1:#0072b2;--line-2:#b86e00;--line-3:#00805c;--line-4:#a8467c;--line-5:#6a51c7;--line-6:#5b6675;"""
_DARK = """--ground:#12161c;--panel:#1a2029;--ink:#e7ecf2;--muted:#9ba7b6;--rule:#333d4a;--accent:#5ab4ec;
--prefix:#3d9bdc;--chunk:#f0b23a;--computed:#515c6b;--on-prefix:#04121d;--on-chunk:#221800;--on-computed:#f0f3f7;
--stock:#aab4c1;--stock-again:#7f8b9a;--stock-cold:#c4b49a;--pic:#2fc795;--pic-off:#de86b8;--differs:#5a4312;--good:#4bd3a5;
--line-1:#5ab4ec;--line-2:#f0b23a;--line-3:#2fc795;--line-4:#de86b8;--line-5:#a996f2;--line-6:#aab4c1;"""


@dataclass(slots=True, frozen=True)
class Scale:
    """Maps `[low, high]` to `[start, end]` in drawing units, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where `value` is drawn; values outside the domain stop at its edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def theme(root: str) -> str:
    """The style sheet that defines every colour on the elements that `root` selects: light, dark, and paper (light)."""
    dark = f"@media (prefers-color-scheme: dark){{{root}{{{_DARK}}}}}"
    return f"{root}{{{_LIGHT}}}\n{dark}\n@media print{{{root}{{{_LIGHT}}}}}\n"


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Ticks at 1, 2 and 5 times powers of ten inside `[low, high]`, thinned to at most `most`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**p for p in powers for s in steps if low * 0.999 <= s * 10.0**p <= high * 1.001]
        if len(ticks) <= most:
            return ticks
    return ticks


def text(x: float, y: float, content: str, *, style: str = "label", anchor: str = "start", fill: str = "") -> str:
    """A text element; `style` is a class of the drawing's style sheet."""
    extra = f' style="fill:var(--{fill})"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    title: str = "",
    radius: float = 0,
    opacity: float = 1.0,
) -> str:
    """A filled rectangle with an optional tooltip."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius:g}"'
    see_through = f";fill-opacity:{opacity:g}" if opacity < 1 else ""
    return f'<rect {size} style="fill:var(--{fill}){see_through}">{tip}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, *, style: str = "grid") -> str:
    """A straight line; `style` is a class of the drawing's style sheet."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def polyline(points: Sequence[tuple[float, float]], stroke: str, *, dash: str = "", width: float = 2.2) -> str:
    """An open line through `points`."""
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f";stroke-dasharray:{dash}" if dash else ""
    return f'<polyline points="{where}" style="fill:none;stroke:var(--{stroke});stroke-width:{width:g}{dashed}"/>'


def shape(name: str, x: float, y: float, size: float, fill: str, *, title: str = "", opacity: float = 1.0) -> str:
    """A marker: `dot`, `ring` or `diamond`."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    if name == "diamond":
        corners = f"{x:.1f},{y - size:.1f} {x + size:.1f},{y:.1f} {x:.1f},{y + size:.1f} {x - size:.1f},{y:.1f}"
        return f'<polygon points="{corners}" style="fill:var(--{fill});fill-opacity:{opacity:g}">{tip}</polygon>'
    paint = f"fill:var(--{fill})" if name == "dot" else f"fill:var(--ground);stroke:var(--{fill});stroke-width:2"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" style="{paint};fill-opacity:{opacity:g}">{tip}</circle>'


def document(body: str, width: float, height: float, label: str) -> str:
    """An `<svg>` element that scales with its container; `label` is its text for screen readers."""
    view = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="{escape(label)}">{body}</svg>'


def count(value: float) -> str:
    """A number of tokens in at most four characters and a unit: 812, 12.3k, 1.23M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            scaled = value / limit
            digits = 2 if scaled < 10 else 1 if scaled < 100 else 0
            return (f"{scaled:.0f}" if scaled == int(scaled) else f"{scaled:.{digits}f}") + unit
    return f"{value:.0f}"


def seconds(value: float | None) -> str:
    """A duration with three digits: 85 ms, 1.24 s."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{share * 100:.{digits}f} %"


def times(factor: float | None) -> str:
    """A factor: 1.82x."""
    return "-" if factor is None else f"{factor:.2f}x" if factor < 10 else f"{factor:.1f}x"
