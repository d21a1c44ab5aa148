"""The combined report of a comparison on several traces, and the lines that the terminal ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pic_bench.compare import charts
from pic_bench.compare.report import overview, write_reports
from pic_bench.compare.run_folder import Run, load_run, load_scenes, scene_folder
from pic_bench.compare.summary import LaterCalls, Paired, ScenesSummary, Summary
from pic_bench.compare.tables import kl_percentiles
from pic_bench.out_folder import scenes_of, write_json
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import count, percent, plural, seconds, times
from pic_bench.report.page import render_pages


def write_all(folder: Path) -> list[Run]:
    """Write the reports of a comparison, on one trace or on several; returns the run of each trace.

    Raises:
        BenchError: if the folder is no finished comparison.
    """
    return list(write_scenes(folder).values()) if scenes_of(folder) else [write_reports(folder)]


def headline(folder: Path) -> str:
    """What the report of a comparison says first, as a person reads it in a terminal."""
    runs = load_scenes(folder)
    return closing_lines(runs) if runs else overview(load_run(folder))


def write_scenes(folder: Path) -> dict[str, Run]:
    """Write every scene's reports, the summary of all and the combined report; returns the scenes.

    Raises:
        BenchError: if a scene's folder is no finished comparison.
    """
    for scene in load_scenes(folder):
        write_reports(scene_folder(folder, scene))
    runs = load_scenes(folder)
    write_json(folder / "summary.json", ScenesSummary(scenes={name: run.summary for name, run in runs.items()}))
    first = next(iter(runs.values()))
    title = f"{' and '.join(run.summary.trace.name for run in runs.values())} on {first.summary.model.name}"
    drawn = charts.scenes([run.summary for run in runs.values()])
    note = "Grey is stock SGLang, green the patched server, on the same requests."
    pages = render_pages(
        "scenes.md.j2",
        title,
        {"report": drawn},
        runs=runs,
        note=note,
        table=_table(runs, _figures),
        environment=first.environment,
        summary=first.summary,
    )
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    (folder / "report.svg").write_text(drawn.standalone(title, note), "utf8")
    return runs


def closing_lines(runs: Mapping[str, Run]) -> str:
    """The terminal's last lines but the path of the report: what every scene saves, and how many answers agree."""
    table = _table(runs, _closing)
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, _conditions(next(iter(runs.values())))])


def _table(runs: Mapping[str, Run], figures: Callable[[Summary, Paired, LaterCalls], dict[str, str]]) -> Table:
    """A row per figure, a column per scene."""
    columns = [
        figures(summary, paired, paired.from_second_call)
        if (paired := (summary := run.summary).paired) is not None and paired.from_second_call is not None
        else {}
        for run in runs.values()
    ]
    labels = dict.fromkeys(label for column in columns for label in column)
    header = ["", *(run.summary.trace.name for run in runs.values())]
    return Table(header, [[label, *(column.get(label, "not compared") for column in columns)] for label in labels])


def _closing(summary: Summary, paired: Paired, later: LaterCalls) -> dict[str, str]:
    stock, patched = (count(summary.arms[name].computed_tokens) for name in (paired.baseline, paired.arm))
    ttfts = f"{seconds(later.baseline_ttft_p50_s)} → {seconds(later.ttft_p50_s)}"
    return {
        "Tokens computed, of stock's": f"{percent(paired.computed_tokens_ratio)} ({stock} → {patched})",
        "TTFT from a session's second call on": f"{times(later.ttft_speedup_p50)} faster ({ttfts})",
        "Same first token as stock": f"{percent(paired.first_token_agreement)} of {plural(paired.requests, 'request')}",
    }


def _figures(_: Summary, paired: Paired, later: LaterCalls) -> dict[str, str]:
    second = "from a session's second call on"
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
        "KL of the first token, p50 / p99": kl_percentiles(paired),
    }


def _conditions(run: Run) -> str:
    model, environment = run.summary.model, run.environment
    machine = "; ".join(environment.gpus) or f"{environment.num_cpus} CPUs"
    parts = [model.name, *([model.dtype] if model.dtype else []), machine]
    return f"{', '.join(parts)}. Spliced answers are approximate; requests with `mode: off` are exact."
