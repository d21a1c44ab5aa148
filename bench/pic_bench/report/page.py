"""A report from one Markdown template: report.md is its text, report.html the same text with drawings and style.

What the templates are given is escaped as it is put in, except for what they escape themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from pic_bench.report import numbers
from pic_bench.report.figures import CHART_STYLE, Drawing, theme
from pic_bench.report.markdown import Table, markdown_table

__all__ = ["Pages", "Picture", "render_pages", "render_text"]


class Picture(NamedTuple):
    """A drawing with the words around it; `name` is the stem of its file."""

    name: str
    title: str
    note: str
    drawing: Drawing


class Pages(NamedTuple):
    """A report in both forms."""

    markdown: str
    html: str


def render_pages(template: str, title: str, pictures: Sequence[Picture], **values: object) -> Pages:
    """Both forms of a report.

    Args:
        template: a Markdown template, which gets `values` and `html`, whether the text is for the page.
        title: of the page, as plain text.
        pictures: what the text may show as `![...](NAME.svg)`.
    """
    body = _MARKDOWN.render(render_text(template, html=True, title=title, pictures=pictures, **values))
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = _BOUNDS.sub(r"<small>\1</small>", body.replace(' style="text-align:right"', ""))
    by_name = {picture.name: picture for picture in pictures}
    body = _IMAGES.sub(lambda found: _figures(found[0], by_name), body)
    page = (
        _templates()
        .get_template("page.html.j2")
        .render(title=Markup(escape(title)), style=Markup(theme(":root") + CHART_STYLE), body=Markup(body))
    )
    return Pages(render_text(template, html=False, title=title, pictures=pictures, **values), page)


def render_text(template: str, **values: object) -> str:
    """A template's text with a final newline and at most one empty line in a row."""
    text = _templates().get_template(template).render(**values)
    return _EMPTY_LINES.sub("\n\n", text).strip() + "\n"


_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_EMPTY_LINES = re.compile(r"\n{3,}")
_IMAGES = re.compile(r"<p>(?:<img [^>]*>\s*)+</p>")
_SOURCE = re.compile(r'src="([^"]+)\.svg"')
_BOUNDS = re.compile(r"(\[[^\]<>]+\])(?=[^<]*</td>)")


def _figures(images: str, pictures: Mapping[str, Picture]) -> str:
    """Drawings side by side where there is room; a drawing alone takes the whole width."""
    shown = [pictures[name] for name in _SOURCE.findall(images)]
    figures = [
        f"<figure><h3>{escape(picture.title)}</h3><p>{escape(picture.note)}</p>"
        f'<div class="draw">{picture.drawing.inline()}</div></figure>'
        for picture in shown
    ]
    return f'<div class="{"charts" if len(shown) > 1 else "chart"}">{"".join(figures)}</div>'


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("pic_bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_escaped,
    )
    names = ("count", "divergence", "percent", "plural", "seconds", "share", "times")
    environment.filters |= {name: getattr(numbers, name) for name in names}
    environment.filters |= {"table": _table, "thousands": lambda value: f"{value:,}", "flat": _flat, "fenced": _fenced}
    return environment


def _table(table: Table) -> Markup:
    header, *rows = ([_escaped(cell) for cell in row] for row in (table.header, *table.rows))
    return Markup(markdown_table(Table(header, rows)))


def _escaped(value: object) -> str:
    """Text that Markdown shows as it is; `|` is for tables to escape."""
    return value if isinstance(value, Markup) else re.sub(r"([*`\\])", r"\\\1", str(value)).replace("<", "&lt;")


def _flat(text: str) -> Markup:
    """Escaped text on one line, for HTML within Markdown: an empty line would end the HTML."""
    return Markup(escape(text).replace("\n", "&#10;"))


def _fenced(text: str) -> Markup:
    """A block of code whose fence is longer than any in the text, so that the text cannot end it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}text\n{text}\n{fence}")
