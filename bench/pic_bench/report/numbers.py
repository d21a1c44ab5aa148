"""How figures are written in every report: short enough for a table cell, with units and intervals.

Tables are described by data files: a title for every column, and a Jinja text that writes its cell of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from pic_bench.report.markdown import Table
from pic_bench.report.stats import Estimate


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


def plural(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def divergence(value: float) -> str:
    """A KL in nats to two digits: 0, 3.1e-7, .0031, .31, 1.24."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    # Rounded before the form is chosen: .99996 is written as 1.00.
    rounded = float(f"{value:.2g}")
    return f"{value:.2f}" if abs(rounded) >= 1 else f"{rounded:#.2g}".replace("0.", ".", 1)


def share(value: float) -> str:
    """A share in percent with one digit, without digits for 0 % and 100 %."""
    return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"


def two(value: float) -> str:
    """A number near 1 with two digits: -.05, .98, 1.00."""
    return f"{value:.2f}".replace("0.", ".", 1) if -1 < round(value, 2) < 1 else f"{value:.2f}"


def with_interval(estimate: Estimate | float | None, write: Callable[[float], str]) -> str:
    """`.0031 [.0024, .0040]`; an interval of no width is left out, and `-` is written where there is no figure."""
    if estimate is None:
        return "-"
    if not isinstance(estimate, Estimate):
        return write(estimate)
    value, low, high = map(write, (estimate.value, estimate.low, estimate.high))
    return value if low == high else f"{value} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]"


def table_of(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> Table:
    """A row for every mapping, whose values the columns' texts name."""
    cells = [JINJA.from_string(cell) for cell in columns.values()]
    # A blank at the end tells a title from the same one before it.
    return Table([title.rstrip() for title in columns], [[cell.render(row) for cell in cells] for row in rows])


_WRITERS = (count, divergence, percent, plural, seconds, share, times, two)
FORMATS: Final[dict[str, Any]] = {
    **{write.__name__: write for write in _WRITERS},
    "number": "{:.4f}".format,
    "score": "{:.3f}".format,
    # Of a difference of two divergences, and of two shares.
    "change": lambda value: ("+" if value > 0 else "") + divergence(value),
    "points": lambda value: f"{value * 100:+.1f}",
}
"""How a figure may be written, by the name that templates and tables use."""
JINJA: Final = Environment(undefined=StrictUndefined)
JINJA.filters |= FORMATS | {
    "figure": lambda value, write: with_interval(value, FORMATS[write]),
    # Tokens that another one stands for: their share, and of how many.
    "flips": lambda found: "-" if found is None else f"{share(found.flips / found.tokens)} of {found.tokens:,}",
    "thousands": "{:,.0f}".format,
}
