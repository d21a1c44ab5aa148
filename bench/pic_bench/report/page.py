"""Owns report.html of a comparison: which parts stand on the page, and in which order.

It must not fetch anything, run scripts, or compute figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from pic_bench.compare.pairing import Pair
from pic_bench.compare.run_folder import Run
from pic_bench.compare.summary import Paired
from pic_bench.report import charts, page_parts, svg
from pic_bench.report.tables import (
    DEFINITIONS,
    Table,
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


def html_report(run: Run) -> str:
    """The whole page."""
    title = f"{run.summary.trace.name} on {run.summary.model.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(run))}</p>',
        f'<p class="lead">{escape(headline(run))}</p>',
        page_parts.tiles(tiles(run)),
        "<h2>Every arm</h2>",
        page_parts.table(arms_table(run)),
        page_parts.table(comparison_table(run)) if run.summary.comparisons else "",
        "<h2>Pictures</h2>",
        _charts(run),
        *_requests(run),
        "<h2>Left out, failed, and limits</h2>",
        page_parts.bullets(limits(run)),
        "<h2>Words</h2>",
        page_parts.definitions(DEFINITIONS),
        "<h2>How it was measured</h2>",
        page_parts.definitions(facts(run)),
        _servers(run),
    ]
    return page_parts.document(title, "".join(body))


def _subtitle(run: Run) -> str:
    summary = run.summary
    arms = ", ".join(summary.arms)
    size = f"{plural(summary.trace.calls, 'call')} of {plural(summary.trace.sessions, 'session')}"
    return f"{size}; arms: {arms}; {summary.started_at}"


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
    table = ""
    if paired is not None and paired.requests:
        table = f"<h2>Time to first token by chunk-hit tokens</h2>{page_parts.table(buckets_table(paired))}"
    return page_parts.figures(figures) + table


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


def _servers(run: Run) -> str:
    rows = [(f"server of {name}", " ".join(arm.server_args)) for name, arm in run.summary.arms.items()]
    counters = [
        (f"{name}: {key}", f"{value:g}")
        for name, arm in run.summary.arms.items()
        for key, value in arm.pic_counters.items()
    ]
    body = f'<div style="margin-top:5px">{page_parts.definitions(rows)}</div>'
    if counters:
        table = Table(["counter", "value"], [list(pair) for pair in counters])
        body += f"<h2>Counters of the plugin at the end of the run</h2>{page_parts.table(table)}"
    return body
