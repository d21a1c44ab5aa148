"""Owns report.html: one self-contained page with inline styles and drawings, readable in light, dark and print.

It must not fetch anything, run scripts, or compute figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pic_bench import charts, svg
from pic_bench.pairing import Pair
from pic_bench.run_folder import Run
from pic_bench.summary import Paired
from pic_bench.tables import (
    DEFINITIONS,
    Table,
    Tile,
    arms_table,
    buckets_table,
    comparison_table,
    facts,
    headline,
    limits,
    plural,
    tiles,
)

__all__ = ["html_report"]

MAX_LISTED = 12
MAX_ANSWER_CHARS = 1500

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
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:18px;margin-top:12px}
figure{margin:0;padding:16px 18px;border:1px solid var(--rule);border-radius:10px;min-width:0}
figure p{font-size:.87rem;color:var(--muted);margin:0 0 8px}
figure .draw{overflow-x:auto}figure svg{display:block;width:100%;min-width:400px;height:auto}
.wide{overflow-x:auto;border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}td:first-child{font-weight:600}
thead th{background:var(--panel);font-weight:600;color:var(--muted);font-size:.82rem;white-space:normal;
line-height:1.3;vertical-align:bottom;min-width:4.6em}
tbody tr:last-child td{border-bottom:0}
.wide+.wide{margin-top:14px}
details{border:1px solid var(--rule);border-radius:8px;margin:8px 0;background:var(--ground)}
summary{cursor:pointer;padding:9px 14px;font-size:.9rem;display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline}
summary::before{content:"▸";color:var(--muted)}details[open]>summary::before{content:"▾"}
summary::-webkit-details-marker{display:none}
summary b{font-weight:600;overflow-wrap:anywhere}summary span{color:var(--muted);font-variant-numeric:tabular-nums}
.tag{color:var(--ink)!important;border:1px solid var(--rule);border-radius:99px;padding:0 9px;font-size:.8rem}
.tag.differs{background:var(--differs)}
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


def html_report(run: Run) -> str:
    """The whole page."""
    title = f"{run.summary.trace.name} on {run.summary.model.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(run))}</p>',
        f'<p class="lead">{escape(headline(run))}</p>',
        _tiles(tiles(run)),
        "<h2>Every arm</h2>",
        _table(arms_table(run)),
        _table(comparison_table(run)) if run.summary.comparisons else "",
        "<h2>Pictures</h2>",
        _charts(run),
        *_requests(run),
        "<h2>Left out, failed, and limits</h2>",
        _bullets(limits(run)),
        "<h2>Words</h2>",
        _definitions(DEFINITIONS),
        "<h2>How it was measured</h2>",
        _definitions(facts(run)),
        _servers(run),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{escape(title)}</title>"
    style = f"<style>:root{{color-scheme:light dark}}\n{svg.theme(':root')}{_STYLE}{charts.CHART_STYLE}</style>"
    page = f"<body><main>\n{''.join(body)}\n</main></body>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head>\n{page}</html>\n'


def _subtitle(run: Run) -> str:
    summary = run.summary
    arms = ", ".join(summary.arms)
    size = f"{plural(summary.trace.calls, 'call')} of {plural(summary.trace.sessions, 'session')}"
    return f"{size}; arms: {arms}; {summary.started_at}"


def _tiles(items: Sequence[Tile]) -> str:
    cells = [
        f'<div class="tile"><b>{escape(t.value)}</b><span>{escape(t.label)}</span><small>{escape(t.note)}</small></div>'
        for t in items
    ]
    return f'<div class="tiles">{"".join(cells)}</div>' if cells else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _charts(run: Run) -> str:
    summary, paired = run.summary, run.summary.paired
    ttfts = {name: run.ttfts(name) for name in summary.arms}
    sources, ecdf = charts.token_sources(summary.arms), charts.ttft_ecdf(summary.arms, ttfts)
    figures = [("Where the prompt tokens came from", "Only the grey part is prefilled by the model.", sources)]
    if summary.comparisons:
        drawn = charts.agreement(summary.comparisons, summary.floor)
        figures.append(("Do the answers agree?", "Greedy answers to the same prompts, against the baseline.", drawn))
    figures.append(("Time to first token", "Further left is faster; rings and figures are medians.", ecdf))
    if paired is not None:
        scatter = charts.speedup_scatter(run.pairs(paired), paired)
        figures.append(("TTFT speedup by chunk-hit tokens", "One dot per paired request; bars are medians.", scatter))
    cells = [
        f'<figure><h3>{escape(t)}</h3><p>{escape(n)}</p><div class="draw">{d}</div></figure>' for t, n, d in figures
    ]
    table = ""
    if paired is not None and paired.requests:
        table = f"<h2>Time to first token by chunk-hit tokens</h2>{_table(buckets_table(paired))}"
    return f'<div class="charts">{"".join(cells)}</div>{table}'


def _requests(run: Run) -> Iterable[str]:
    paired = run.summary.paired
    if paired is None:
        return
    pairs = run.pairs(paired)
    differing = sorted((p for p in pairs if not p.same_output), key=lambda p: (p.same_prefix_share, -(p.kl or 0.0)))
    yield f"<h2>Requests whose answers differ most ({min(len(differing), MAX_LISTED)} of {len(differing)})</h2>"
    yield "".join(_request(pair, paired) for pair in differing[:MAX_LISTED]) or "<p>None: every answer is the same.</p>"
    slowest = sorted(pairs, key=lambda p: p.arm.ttft_s or 0.0, reverse=True)[:MAX_LISTED]
    yield f"<h2>Slowest requests of {escape(paired.arm)} ({len(slowest)} of {len(pairs)})</h2>"
    yield "".join(_request(pair, paired) for pair in slowest)


def _request(pair: Pair, paired: Paired) -> str:
    base, arm = pair.base, pair.arm
    tag = (
        '<span class="tag">same answer</span>'
        if pair.same_output
        else '<span class="tag differs">answers differ</span>'
    )
    first = '<span class="tag differs">first token differs</span>' if pair.same_first_token is False else ""
    tokens = f"{arm.prompt_tokens or 0:,} prompt = {arm.prefix_hit_tokens or 0:,} prefix"
    tokens += f" + {arm.chunk_hit_tokens or 0:,} chunk + {arm.computed_tokens or 0:,} computed"
    time = f"TTFT {svg.seconds(base.ttft_s)} → {svg.seconds(arm.ttft_s)} ({svg.times(pair.speedup)})"
    kl = f"<span>KL {pair.kl:.1e}</span>" if pair.kl is not None else ""
    same = 0
    if not pair.same_output:
        same = round(pair.same_prefix_share * max(len(base.output_text), len(arm.output_text)))
    columns = "".join(
        f"<div><h4>{escape(name)}</h4><pre>{_answer(text, same, differs=not pair.same_output)}</pre></div>"
        for name, text in ((paired.baseline, base.output_text), (paired.arm, arm.output_text))
    )
    top = f"<b>{escape(base.session_id)} · call {base.call}</b>{tag}{first}<span>{time}</span><span>{tokens}</span>{kl}"
    return f'<details><summary>{top}</summary><div class="answers">{columns}</div></details>'


def _answer(text: str, same: int, *, differs: bool) -> str:
    if not text:
        return "<i>(empty)</i>"
    start = max(0, same - MAX_ANSWER_CHARS // 2)
    shown = text[start : start + MAX_ANSWER_CHARS]
    before, after = shown[: same - start], shown[same - start :]
    marked = escape(before) + (f"<mark>{escape(after)}</mark>" if after else "") if differs else escape(shown)
    return ("… " if start else "") + marked + (" …" if len(text) > start + len(shown) else "")


def _bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(word)}</dt><dd>{escape(text)}</dd>' for word, text in pairs)}</dl>"


def _servers(run: Run) -> str:
    rows = [(f"server of {name}", " ".join(arm.server_args)) for name, arm in run.summary.arms.items()]
    counters = [
        (f"{name}: {key}", f"{value:g}")
        for name, arm in run.summary.arms.items()
        for key, value in arm.pic_counters.items()
    ]
    body = f'<div style="margin-top:5px">{_definitions(rows)}</div>'
    if counters:
        table = Table(["counter", "value"], [list(pair) for pair in counters])
        body += f"<h2>Counters of the plugin at the end of the run</h2>{_table(table)}"
    return body
