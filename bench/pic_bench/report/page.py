"""A report from one Markdown template: report.md is its text, report.html the same text with a style.

What the templates are given is escaped as it is put in, except for what they escape themselves.
"""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from pathlib import Path

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from pic_bench.out_folder import write_json
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.numbers import FORMATS
from sglang_pic.output import write_whole

THEME = "".join(
    each.read_text("utf8")
    for each in (files("sglang_pic.explain") / "assets/palette.css", files("pic_bench.report") / "templates/theme.css")
)
"""The style sheet of pages: every colour, light (also on paper) and dark, and the font.

Tokens by their source have the colours of all pages; the patched server has that of spliced tokens, stock a grey.
"""


def write_pages(folder: Path, summary: msgspec.Struct, template: str, title: str, **values: object) -> None:
    """Write a report into a folder: summary.json, report.md and report.html.

    Args:
        template: a Markdown template; gets `title`, `summary`, `values` and `html`, whether the text is for the page.
        title: of the page, as plain text.
    """
    values |= {"title": title, "summary": summary}
    body = _MARKDOWN.render(render_text(template, html=True, **values))
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = _BOUNDS.sub(r"<small>\1</small>", body.replace(' style="text-align:right"', ""))
    page = (
        _templates()
        .get_template("page.html.j2")
        .render(title=Markup(escape(title)), theme=Markup(THEME), body=Markup(body))
    )
    write_json(folder / "summary.json", summary)
    write_whole(folder / "report.md", render_text(template, html=False, **values).encode())
    write_whole(folder / "report.html", page.encode())


def render_text(template: str, **values: object) -> str:
    """A template's text with a final newline and at most one empty line in a row."""
    text = _templates().get_template(template).render(**values)
    return _EMPTY_LINES.sub("\n\n", text).strip() + "\n"


_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_EMPTY_LINES = re.compile(r"\n{3,}")
_BOUNDS = re.compile(r"(\[[^\]<>]+\])(?=[^<]*</td>)")


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("pic_bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escaped,
    )
    environment.filters |= {**FORMATS, "table": _table, "thousands": "{:,}".format, "flat": _flat, "fenced": _fenced}
    return environment


def _table(table: Table) -> Markup:
    header, *rows = ([_escaped(cell) for cell in row] for row in (table.header, *table.rows))
    return Markup(markdown_table(Table(header, rows)))


def _escaped(value: object) -> str:
    """Text that Markdown shows as it is, on one line and without links; `|` is for tables to escape."""
    if isinstance(value, Markup):
        return value
    line = re.sub(r"\s*[\r\n]\s*", " ", str(value))
    return re.sub(r"([*`\\]|\](?=[(\[:]))", r"\\\1", line).replace("<", "&lt;")


def _flat(text: str) -> Markup:
    """Escaped text on one line, for HTML within Markdown: an empty line would end the HTML."""
    return Markup(escape(text).replace("\r", "&#13;").replace("\n", "&#10;"))


def _fenced(text: str) -> Markup:
    """A block of code whose fence is longer than any in the text, so that the text cannot end it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{text}\n{fence}")
