"""Writes a comparison's reports from its folder alone: summary.json, report.md, report.html and report.svg."""

from __future__ import annotations

from pathlib import Path

from pic_bench.compare import charts
from pic_bench.compare.pairing import Pair
from pic_bench.compare.run_folder import Run, load_run
from pic_bench.compare.summary import Paired
from pic_bench.compare.tables import arms_table, buckets_table, comparison_table, counters_table
from pic_bench.out_folder import write_json
from pic_bench.report.numbers import percent, plural, times
from pic_bench.report.page import render_pages, render_text

MAX_LISTED = 12
MAX_ANSWER_CHARS = 1500


def write_reports(folder: Path) -> Run:
    """Write the summary and the three reports into the comparison's folder and return the run they show.

    Raises:
        BenchError: if the folder is no finished comparison.
    """
    run = load_run(folder)
    summary = run.summary
    title = f"{summary.trace.name} on {summary.model.name}"
    poster = charts.poster(summary.arms, {name: run.ttfts(name) for name in summary.arms})
    drawings = {"report": poster}
    if summary.paired is not None:
        drawings["speedup"] = charts.speedup_scatter(run.pairs(summary.paired), summary.paired)
    pages = render_pages("comparison.md.j2", title, drawings, **_overview_values(run), **_values(run))
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    (folder / "report.svg").write_text(poster.standalone(title, _subtitle(run)), "utf8")
    return run


def overview(run: Run) -> str:
    """The top of the report: title, result and the two tables, as a person reads them in a terminal."""
    return render_text("overview.md.j2", **_overview_values(run))


def _overview_values(run: Run) -> dict[str, object]:
    paired = run.summary.paired
    return {
        "summary": run.summary,
        "paired": paired,
        "later": paired.from_second_call if paired is not None else None,
        "most": paired.at_least_chunk_hit_tokens[-1] if paired is not None else None,
        "floor": run.summary.floor,
        "arms": arms_table(run),
        "comparison": comparison_table(run),
    }


def _values(run: Run) -> dict[str, object]:
    summary = run.summary
    arms = list(summary.arms.values())
    return {
        "config": run.config,
        "environment": run.environment,
        "buckets": buckets_table(summary.paired) if summary.paired is not None else None,
        "counters": counters_table(run),
        "around": _around,
        "request_lists": _request_lists(run, summary.paired) if summary.paired is not None else {},
        "complete": not any(arm.skipped or arm.failed for arm in arms)
        and not any(pair.prompts_differ for pair in summary.comparisons),
        "repeated": len({arm.kind for arm in arms}) < len(arms),
        "flattened": any(arm.tools_flattened for arm in arms),
    }


def _subtitle(run: Run) -> str:
    summary, paired = run.summary, run.summary.paired
    subtitle = f"{plural(summary.trace.calls, 'call')} of {plural(summary.trace.sessions, 'session')}"
    if paired is not None and paired.requests:
        subtitle += f"; {percent(paired.computed_tokens_ratio)} of stock's tokens computed, "
        subtitle += f"median TTFT {times(paired.ttft_speedup_p50)} faster"
    return subtitle


def _request_lists(run: Run, paired: Paired) -> dict[str, list[Pair]]:
    pairs = run.pairs(paired)
    differing = sorted((p for p in pairs if not p.same_output), key=lambda p: (p.same_prefix_share, -(p.kl or 0.0)))
    slowest = sorted(pairs, key=lambda p: p.arm.ttft_s or 0.0, reverse=True)
    lists = {"Requests whose answers differ most": differing, f"Slowest requests of {paired.arm}": slowest}
    return {f"{title} ({len(some[:MAX_LISTED])} of {len(some)})": some[:MAX_LISTED] for title, some in lists.items()}


def _around(text: str, same: int) -> tuple[str, str]:
    """The same and the differing part of an answer, cut around the place where the two answers part."""
    start = max(0, same - MAX_ANSWER_CHARS // 2)
    end = start + MAX_ANSWER_CHARS
    before, after = text[start : min(same, end)], text[min(same, end) : end]
    rest = " …" if len(text) > end else ""
    return ("… " if start else "") + before + ("" if after else rest), after + (rest if after else "")
