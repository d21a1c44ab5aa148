"""Drawings by matplotlib as SVG whose colours are CSS variables: one drawing serves light, dark and paper.

matplotlib needs a colour for everything it draws. `colour` gives it a stand-in for a variable of the theme, and
`drawing` puts the variable in its place. Text stays text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pic_bench.report.page import THEME

_FILES = Path(__file__).parent / "templates"
LINES = tuple(f"line-{number}" for number in range(1, 7))
_NAMES = dict.fromkeys(re.findall(r"--([a-z0-9-]+):", THEME))
_STAND_INS = {name: f"#0100{number:02x}" for number, name in enumerate(_NAMES)}
_SETTINGS: dict[Any, Any] = {
    **mpl.rc_params_from_file(_FILES / "charts.mplstyle", use_default_template=False),
    **dict.fromkeys(("text.color", "axes.titlecolor"), _STAND_INS["ink"]),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _STAND_INS["muted"]),
    "grid.color": _STAND_INS["rule"],
}


@dataclass(slots=True)
class Drawing:
    """A picture in units of CSS pixels; `label` is its text for screen readers."""

    width: float
    height: float
    label: str
    body: str = field(default="")

    def standalone(self, title: str, subtitle: str) -> str:
        """A file of its own, with ground, theme and title."""
        pad, top = 20, 60
        width, height = self.width + 2 * pad, self.height + top + 12
        parts = [
            f"<style>{THEME}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="10" style="fill:var(--ground)"/>',
            f'<text x="{pad}" y="28" class="title">{escape(title)}</text>',
            f'<text x="{pad}" y="48" class="sub">{escape(subtitle)}</text>',
            f'<g transform="translate({pad},{top})">{self.body}</g>',
        ]
        view = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        label = f'role="img" aria-label="{escape(self.label)}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {view} {label}>{"".join(parts)}</svg>\n'


@contextmanager
def drawing(label: str, width: float, height: float) -> Iterator[tuple[Drawing, Figure]]:
    """An empty figure to draw on; the drawing is complete when the block ends."""
    drawn = Drawing(width, height, label)
    # The salt makes the ids within a drawing its own: a page holds several.
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": label}):
        figure = Figure(figsize=(width / 72, height / 72))
        yield drawn, figure
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    # The content of matplotlib's `<svg>`, shortened, with the theme's variables.
    drawn.body = _HEAD.sub("", written.getvalue(), count=1).rpartition("</svg>")[0]
    for pattern, shorter in _SHORTER:
        drawn.body = pattern.sub(shorter, drawn.body)
    for name, stand_in in _STAND_INS.items():
        drawn.body = drawn.body.replace(stand_in, f"var(--{name})")


def colour(name: str) -> str:
    """The stand-in for a variable of the theme, as matplotlib's colour."""
    return _STAND_INS[name]


def place(figure: Figure, *, left: float, top: float, right: float, bottom: float) -> Axes:
    """Axes within a figure, from their margins in pixels."""
    width, height = figure.get_size_inches() * 72
    inner = ((width - left - right) / width, (height - top - bottom) / height)
    return figure.add_axes((left / width, bottom / height, *inner))


def log_ticks(axes: Axes, which: str, write: Callable[[float], str], *, most: int = 7) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, thinned to at most `most`."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**p for p in powers for s in steps if low * 0.999 <= s * 10.0**p <= high * 1.001]
        if len(ticks) <= most:
            break
    axis.set_ticks(ticks, [write(tick) for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(low, high, ignore=True)


_HEAD = re.compile(r"^.*?</defs>", re.DOTALL)
_SHORTER: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(r"\s+"), " "),
    (re.compile(r"<!--.*?-->|<g[^>]*>|</g>|<defs> ?<clipPath.*?</defs>"), ""),
    (re.compile(r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"|(?<=d=") | (?=")'), ""),
    (re.compile(r' style="([^"]*)"'), lambda found: _style(found[1])),
    (re.compile(r' (d|x|y|transform)="[^"]*"'), lambda found: _rounded(found[0])),
    (re.compile("xlink:href"), "href"),
    (re.compile(r"(?<=>) +(?=<)"), ""),
)
_USELESS = re.compile("(font-family|stroke-line(cap|join)|stroke-dashoffset):|font-size: 12px|text-anchor: start")


def _style(declarations: str) -> str:
    """A style attribute without declarations that the style sheet has, or that make no visible difference."""
    kept = [one.replace(": ", ":") for one in declarations.split("; ") if not _USELESS.match(one)]
    return f' style="{";".join(kept)}"' if kept else ""


def _rounded(attribute: str) -> str:
    """Coordinates to a tenth of a pixel, without blanks around a path's commands."""
    short = re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute)
    return re.sub(r" ?([MLz]) (?=[-\d])", r"\1", short)
