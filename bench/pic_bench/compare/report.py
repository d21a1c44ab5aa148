"""Writes a comparison's reports from its folder alone: summary.json, report.md, report.html and report.svg.

A comparison on several traces (scenes) has these for every scene, and a combined report of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pic_bench.compare import charts, tables
from pic_bench.compare.pairing import Pair
from pic_bench.compare.run_folder import Run, load_run, load_scenes
from pic_bench.compare.summary import Paired, ScenesSummary, Summary
from pic_bench.out_folder import scenes_of, write_json
from pic_bench.report.figures import Drawing
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import count, percent, plural, seconds, times
from pic_bench.report.page import render_pages, render_text

MAX_LISTED = 12
MAX_ANSWER_CHARS = 1500


def write_all(folder: Path) -> list[Run]:
    """Write the reports of a comparison, on one trace or on several; returns the run of each trace.

    Raises:
        BenchError: if the folder is no finished comparison.
    """
    runs = {scene: _write_run(folder / scene) for scene in scenes_of(folder)}
    if not runs:
        return [_write_run(folder)]
    first, *_ = runs.values()
    drawn = charts.scenes([run.summary for run in runs.values()])
    title = f"{' and '.join(run.summary.trace.name for run in runs.values())} on {first.summary.model.name}"
    note = "Grey is stock SGLang, green the patched server, on the same requests."
    values = {
        "runs": runs,
        "note": note,
        "table": _table(runs, _figures),
        "environment": first.environment,
        "summary": first.summary,
    }
    told = ScenesSummary(scenes={name: run.summary for name, run in runs.items()})
    _write(folder, told, "scenes.md.j2", title, note, drawn, values)
    return list(runs.values())


def headline(folder: Path) -> str:
    """What the report of a comparison says first, as a person reads it in a terminal."""
    runs = load_scenes(folder)
    return _closing_lines(runs) if runs else render_text("overview.md.j2", **_overview_values(load_run(folder).summary))


def _write_run(folder: Path) -> Run:
    """Write the reports of one trace."""
    run = load_run(folder)
    summary = run.summary
    title = f"{summary.trace.name} on {summary.model.name}"
    poster = charts.poster(summary.arms, {name: run.ttfts(name) for name in summary.arms})
    values = {**_overview_values(summary), **_values(run)}
    _write(folder, summary, "comparison.md.j2", title, _subtitle(summary), poster, values)
    return run


def _write(
    folder: Path,
    summary: Summary | ScenesSummary,
    template: str,
    title: str,
    subtitle: str,
    drawn: Drawing,
    values: Mapping[str, object],
) -> None:
    pages = render_pages(template, title, {"report": drawn}, **values)
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    (folder / "report.svg").write_text(drawn.standalone(title, subtitle), "utf8")


def _overview_values(summary: Summary) -> dict[str, object]:
    return {"summary": summary, "paired": summary.paired, "floor": summary.floor, "tables": tables}


def _values(run: Run) -> dict[str, object]:
    summary = run.summary
    arms = list(summary.arms.values())
    is_whole = not any(arm.skipped or arm.failed for arm in arms)
    return {
        "config": run.config,
        "environment": run.environment,
        "counters": tables.counters_table(summary),
        "around": _around,
        "request_lists": _request_lists(run, summary.paired) if summary.paired is not None else {},
        "complete": is_whole and not any(pair.prompts_differ for pair in summary.comparisons),
        "repeated": len({arm.kind for arm in arms}) < len(arms),
        "flattened": any(arm.tools_flattened for arm in arms),
    }


def _subtitle(summary: Summary) -> str:
    paired = summary.paired
    subtitle = f"{plural(summary.trace.calls, 'call')} of {plural(summary.trace.sessions, 'session')}"
    if paired is not None and paired.requests:
        subtitle += f"; {percent(paired.computed_tokens_ratio)} of stock's tokens computed, "
        subtitle += f"median TTFT {times(paired.ttft_speedup_p50)} faster"
    return subtitle


def _request_lists(run: Run, paired: Paired) -> dict[str, list[Pair]]:
    pairs = run.pairs(paired)
    differing = sorted((p for p in pairs if not p.same_output), key=lambda p: (p.same_len, -(p.kl or 0.0)))
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


def _closing_lines(runs: Mapping[str, Run]) -> str:
    """The terminal's last lines but the path of the report: what every scene saves, and how many answers agree."""
    table = _table(runs, _closing)
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, _conditions(next(iter(runs.values())))])


def _table(runs: Mapping[str, Run], figures: Callable[[Summary, Paired], dict[str, str]]) -> Table:
    """A row per figure, a column per scene."""
    columns = [{} if run.summary.paired is None else figures(run.summary, run.summary.paired) for run in runs.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    header = ["", *(run.summary.trace.name for run in runs.values())]
    return Table(header, [[label, *(column.get(label, "not compared") for column in columns)] for label in labels])


def _closing(summary: Summary, paired: Paired) -> dict[str, str]:
    later = paired.from_second_call
    stock, patched = (count(summary.arms[name].computed_tokens) for name in (paired.baseline, paired.arm))
    ttfts = f"{seconds(later.baseline_ttft_p50_s)} → {seconds(later.ttft_p50_s)}"
    return {
        "Tokens computed, of stock's": f"{percent(paired.computed_tokens_ratio)} ({stock} → {patched})",
        "TTFT from a session's second call on": f"{times(later.ttft_speedup_p50)} faster ({ttfts})",
        "Same first token as stock": f"{percent(paired.first_token_agreement)} of {plural(paired.requests, 'request')}",
    }


def _figures(_: Summary, paired: Paired) -> dict[str, str]:
    later, second = paired.from_second_call, "from a session's second call on"
    return {
        "requests": f"{paired.requests:,}",
        "tokens computed, of stock's": percent(paired.computed_tokens_ratio),
        f"tokens computed {second}, of stock's": percent(later.computed_tokens_ratio),
        "median TTFT speedup": times(paired.ttft_speedup_p50),
        f"median TTFT speedup {second}": times(later.ttft_speedup_p50),
        f"median TTFT {second}, stock": seconds(later.baseline_ttft_p50_s),
        f"median TTFT {second}, patched": seconds(later.ttft_p50_s),
        "same first token as stock": percent(paired.first_token_agreement),
        "same whole answer as stock": percent(paired.output_agreement),
        "KL of the first token, p50 / p99": tables.kl_percentiles(paired),
    }


def _conditions(run: Run) -> str:
    model, environment = run.summary.model, run.environment
    machine = "; ".join(environment.gpus) or f"{environment.num_cpus} CPUs"
    parts = [model.name, *([model.dtype] if model.dtype else []), machine]
    return f"{', '.join(parts)}. Spliced answers are approximate; requests with `mode: off` are exact."
