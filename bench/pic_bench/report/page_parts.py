"""Owns the look of every report page: one document with inline styles, readable in light, dark and print.

It must not know what a report is about, fetch anything, or run scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from pic_bench.report import svg
from pic_bench.report.charts import CHART_STYLE
from pic_bench.report.tables import Table, Tile

__all__ = ["bullets", "definitions", "document", "figures", "table", "tiles"]

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:1.13rem;margin:40px 0 12px}
h3{font-size:1rem;margin:0 0 2px}
p{margin:0 0 10px;max-width:76ch}
.muted{color:var(--muted)}.lead{font-size:1.06rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:14px;margin:22px 0 8px}
.tile{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:14px 18px}
.tile b{display:block;font-size:2rem;line-height:1.15;font-variant-numeric:tabular-nums;letter-spacing:-.02em}
.tile span{display:block;font-size:.93rem}.tile small{color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:18px;margin-top:12px}
figure{margin:0;padding:16px 18px;border:1px solid var(--rule);border-radius:10px;min-width:0}
figure p{font-size:.87rem;color:var(--muted);margin:0 0 8px}
figure .draw{overflow-x:auto}figure svg{display:block;width:100%;min-width:400px;height:auto}
.wide{overflow-x:auto;border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}td:first-child{font-weight:600}
thead th{background:var(--panel);font-weight:600;color:var(--muted);font-size:.82rem;white-space:normal;
line-height:1.3;vertical-align:bottom;min-width:4.6em}
td.long{white-space:normal;min-width:17em;text-align:left}td small{color:var(--muted);font-size:.84em}
tbody tr:last-child td{border-bottom:0}
.wide+.wide{margin-top:14px}
details{border:1px solid var(--rule);border-radius:8px;margin:8px 0;background:var(--ground)}
summary{cursor:pointer;padding:9px 14px;font-size:.9rem;display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline}
summary::before{content:"▸";color:var(--muted)}details[open]>summary::before{content:"▾"}
summary::-webkit-details-marker{display:none}
summary b{font-weight:600;overflow-wrap:anywhere}summary span{color:var(--muted);font-variant-numeric:tabular-nums}
.tag{color:var(--ink)!important;border:1px solid var(--rule);border-radius:99px;padding:0 9px;font-size:.8rem}
.tag.differs,.tag.no{background:var(--differs)}.tag.yes{border-color:var(--good);color:var(--good)!important}
.claims{columns:2 480px;column-gap:36px}
.claim{margin:0 0 16px;break-inside:avoid}.claim h3{break-after:avoid}.claim li{break-inside:avoid}
.claim h3{margin:0 0 4px}h3.over{margin:22px 0 8px}details>.wide{margin:0 10px 10px}
.text{padding:0 14px 14px}.keep{white-space:nowrap}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:12px;padding:2px 14px 14px}
.answers h4{margin:0 0 4px;font-size:.82rem;color:var(--muted);font-weight:600}
pre{margin:0;padding:10px 12px;background:var(--panel);border-radius:6px;font:12.5px/1.5 ui-monospace,SFMono-Regular,
Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;max-height:340px;overflow-y:auto}
mark{background:var(--differs);color:inherit;border-radius:2px}
dl{display:grid;grid-template-columns:minmax(9rem,max-content) 1fr;gap:5px 20px;font-size:.9rem;margin:0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
ul{padding-left:20px;margin:0}li{margin:4px 0;max-width:90ch;font-size:.93rem}
code{font:.85em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media (max-width:560px){main{padding:22px 14px 40px}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}
figure{padding:12px}.tile b{font-size:1.7rem}}
@media print{main{max-width:none;padding:0}figure,.tile,details,tr{break-inside:avoid}h2{break-after:avoid}
body{font-size:11pt}.charts{grid-template-columns:1fr 1fr}figure svg{min-width:0}pre{max-height:none}
.wide{overflow:visible}th,td{white-space:normal;padding:5px 7px}}
"""


LONG_CELL = 60
_BOUNDS = re.compile(r"(\[[^\]]+\])")


def document(title: str, body: str) -> str:
    """The whole page around `body`, which is HTML; `title` is plain text."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{escape(title)}</title>"
    style = f"<style>:root{{color-scheme:light dark}}\n{svg.theme(':root')}{_STYLE}{CHART_STYLE}</style>"
    page = f"<body><main>\n{body}\n</main></body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head>\n{page}</html>\n'


def figures(drawn: Iterable[tuple[str, str, str]]) -> str:
    """Drawings side by side where there is room: each a title, a note and an `<svg>` element."""
    cells = [f'<figure><h3>{escape(t)}</h3><p>{escape(n)}</p><div class="draw">{d}</div></figure>' for t, n, d in drawn]
    return f'<div class="charts">{"".join(cells)}</div>'


def tiles(items: Sequence[Tile]) -> str:
    """Figures of the head, side by side; nothing for none."""
    cells = [
        f'<div class="tile"><b>{escape(t.value)}</b><span>{escape(t.label)}</span><small>{escape(t.note)}</small></div>'
        for t in items
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def table(shown: Table) -> str:
    """A table that scrolls sideways where it is wider than the page."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in shown.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def bullets(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Words and what they mean, or facts and their values."""
    return f"<dl>{''.join(f'<dt>{escape(word)}</dt><dd>{escape(text)}</dd>' for word, text in pairs)}</dl>"


def _cell(text: str) -> str:
    """A figure, with the bounds of its interval smaller behind it; a sentence may take several lines."""
    kind = ' class="long"' if len(text) > LONG_CELL else ""
    figure = _BOUNDS.sub(r"<small>\1</small>", escape(text))
    return f"<td{kind}>{figure}</td>"
