"""The combined report of a comparison on several traces, and the lines that the terminal ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pic_bench.compare.run_folder import Run, load_scenes, scene_folder
from pic_bench.compare.summary import LaterCalls, Paired, ScenesSummary, Summary
from pic_bench.out_folder import write_json
from pic_bench.report import charts
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import count, percent, plural, seconds, times
from pic_bench.report.page import render_pages
from pic_bench.report.report import write_reports

Row = Callable[[Summary, Paired, LaterCalls], str]


def write_scenes(folder: Path) -> dict[str, Run]:
    """Write every scene's reports, the summary of all and the combined report; returns the scenes.

    Raises:
        BenchError: if a scene's folder is no finished comparison.
    """
    for scene in load_scenes(folder):
        write_reports(scene_folder(folder, scene))
    runs = load_scenes(folder)
    write_json(folder / "summary.json", ScenesSummary(scenes={name: run.summary for name, run in runs.items()}))
    title = _title(runs)
    drawn = charts.scenes([run.summary for run in runs.values()])
    note = "Grey is stock SGLang, green the patched server, on the same requests."
    first = next(iter(runs.values()))
    pages = render_pages(
        "scenes.md.j2",
        title,
        {"report": drawn},
        runs=runs,
        note=note,
        table=scenes_table(runs),
        environment=first.environment,
        summary=first.summary,
    )
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    (folder / "report.svg").write_text(drawn.standalone(title, note), "utf8")
    return runs


def scenes_table(runs: Mapping[str, Run]) -> Table:
    """A row per figure, a column per scene."""
    later = "from a session's second call on"
    rows: Sequence[tuple[str, Row]] = (
        ("requests", lambda _, paired, __: f"{paired.requests:,}"),
        ("tokens computed, of stock's", lambda _, paired, __: percent(paired.computed_tokens_ratio)),
        (f"tokens computed {later}, of stock's", lambda _, __, later: percent(later.computed_tokens_ratio)),
        ("median TTFT speedup", lambda _, paired, __: times(paired.ttft_speedup_p50)),
        (f"median TTFT speedup {later}", lambda _, __, later: times(later.ttft_speedup_p50)),
        (f"median TTFT {later}, stock", lambda _, __, later: seconds(later.baseline_ttft_p50_s)),
        (f"median TTFT {later}, patched", lambda _, __, later: seconds(later.ttft_p50_s)),
        ("same first token as stock", lambda _, paired, __: percent(paired.first_token_agreement)),
        ("same whole answer as stock", lambda _, paired, __: percent(paired.output_agreement)),
        ("KL of the first token, p50 / p99", _kl),
    )
    header = ["", *(run.summary.trace.name for run in runs.values())]
    return Table(header, [[label, *(_cell(run, row) for run in runs.values())] for label, row in rows])


def closing_lines(runs: Mapping[str, Run]) -> str:
    """What the terminal says, before where the report lies: what every scene saves, and how far answers agree."""
    rows = [["", *(run.summary.trace.name for run in runs.values())]]
    for label, row in (
        ("Tokens computed, of stock's", _tokens),
        ("TTFT from a session's second call on", _ttft),
        ("Same first token as stock", _agreement),
    ):
        rows.append([label, *(_cell(run, row) for run in runs.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, _conditions(next(iter(runs.values())))])


def _cell(run: Run, row: Row) -> str:
    paired = run.summary.paired
    if paired is None or paired.from_second_call is None or not paired.requests:
        return "not compared"
    return row(run.summary, paired, paired.from_second_call)


def _tokens(summary: Summary, paired: Paired, _: LaterCalls) -> str:
    stock, patched = (summary.arms[name].computed_tokens for name in (paired.baseline, paired.arm))
    return f"{percent(paired.computed_tokens_ratio)} ({count(stock)} → {count(patched)})"


def _ttft(_: Summary, __: Paired, later: LaterCalls) -> str:
    speedup = times(later.ttft_speedup_p50)
    return f"{speedup} faster ({seconds(later.baseline_ttft_p50_s)} → {seconds(later.ttft_p50_s)})"


def _agreement(_: Summary, paired: Paired, __: LaterCalls) -> str:
    return f"{percent(paired.first_token_agreement)} of {plural(paired.requests, 'request')}"


def _kl(_: Summary, paired: Paired, __: LaterCalls) -> str:
    kl = paired.first_token_kl
    return f"{kl.p50:.1e} / {kl.p99:.1e}" if kl else "-"


def _conditions(run: Run) -> str:
    model, environment = run.summary.model, run.environment
    machine = "; ".join(environment.gpus) or f"{environment.num_cpus} CPUs"
    parts = [model.name, *([model.dtype] if model.dtype else []), machine]
    return f"{', '.join(parts)}. Spliced answers are approximate; requests with `mode: off` are exact."


def _title(runs: Mapping[str, Run]) -> str:
    names = " and ".join(run.summary.trace.name for run in runs.values())
    return f"{names} on {next(iter(runs.values())).summary.model.name}"
