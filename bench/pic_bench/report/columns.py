"""Tables that a data file describes: a title for every column, and a Jinja text that writes its cell of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from jinja2 import Environment, StrictUndefined

from pic_bench.report import numbers
from pic_bench.report.markdown import Table
from pic_bench.report.stats import Estimate

_WRITERS = ("change", "count", "divergence", "number", "percent", "plural", "points", "score", "seconds", "share")
FORMATS: Final = {name: getattr(numbers, name) for name in (*_WRITERS, "times", "two")}
"""How a figure may be written, by the name that templates and tables use."""
JINJA: Final = Environment(undefined=StrictUndefined)


def table_of(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> Table:
    """A row for every mapping, whose values the columns' texts name."""
    cells = [JINJA.from_string(cell) for cell in columns.values()]
    # A blank at the end tells a title from the same one before it.
    return Table([title.rstrip() for title in columns], [[cell.render(row) for cell in cells] for row in rows])


def _figure(value: Estimate | float | None, write: str) -> str:
    return numbers.with_interval(value, FORMATS[write])


def _flips(found: Any) -> str:
    """Tokens that another one stands for: their share, and of how many."""
    return "-" if found is None else f"{numbers.share(found.flips / found.tokens)} of {found.tokens:,}"


JINJA.filters |= {**FORMATS, "figure": _figure, "flips": _flips, "thousands": "{:,.0f}".format}
