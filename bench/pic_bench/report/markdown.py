"""Owns report.md and the table that the terminal shows: the same text.

It must not know HTML, charts or how figures are computed.
"""

from __future__ import annotations

from pic_bench.compare.run_folder import Run
from pic_bench.report.tables import (
    DEFINITIONS,
    Table,
    arms_table,
    buckets_table,
    comparison_table,
    facts,
    headline,
    limits,
)

__all__ = ["markdown_report", "markdown_table", "overview"]


def overview(run: Run) -> str:
    """The top of the report: title, headline and the two tables, as a person reads them in a terminal."""
    summary = run.summary
    parts = [f"# {summary.trace.name} on {summary.model.name}", headline(run), markdown_table(arms_table(run))]
    if summary.comparisons:
        parts.append(markdown_table(comparison_table(run)))
    return "\n\n".join(parts) + "\n"


def markdown_report(run: Run) -> str:
    """The whole of report.md."""
    parts = [overview(run).rstrip()]
    if run.summary.paired is not None:
        parts += ["## Time to first token by chunk-hit tokens", markdown_table(buckets_table(run.summary.paired))]
    parts += ["## Left out, failed, and limits", _bullets(limits(run))]
    parts += ["## Words", _bullets([f"**{word}**: {meaning}" for word, meaning in DEFINITIONS])]
    parts += ["## How it was measured", _bullets([f"**{what}**: {value}" for what, value in facts(run)])]
    for name, arm in run.summary.arms.items():
        parts.append(f"Server of `{name}`: `{' '.join(arm.server_args)}`")
    counters = [(n, k, v) for n, arm in run.summary.arms.items() for k, v in arm.pic_counters.items()]
    if counters:
        rows = [[f"`{key}`", name, f"{value:g}"] for name, key, value in counters]
        parts += [
            "## Counters of the plugin at the end of the run",
            markdown_table(Table(["counter", "arm", "value"], rows)),
        ]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """A pipe table whose columns line up as plain text; figures to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.header))]
    lines = []
    for number, row in enumerate(cells):
        aligned = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append(f"| {' | '.join(aligned)} |")
        if number == 0:
            rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
            lines.append(f"| {' | '.join(rules)} |")
    return "\n".join(lines)


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
