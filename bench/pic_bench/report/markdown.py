"""Tables as Markdown, which a terminal shows as well as a page."""

from __future__ import annotations

from typing import NamedTuple

from pic_traces.printable import printable


class Table(NamedTuple):
    """A header and rows of equal length; the first column is text, the others are figures."""

    header: list[str]
    rows: list[list[str]]


def markdown_table(table: Table) -> str:
    """A pipe table whose columns line up as plain text; figures to the right."""
    cells = [[printable(cell).replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.header))]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    aligned.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)
