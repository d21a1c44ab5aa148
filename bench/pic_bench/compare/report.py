"""Writes a comparison's reports from its folder alone: summary.json, report.md and report.html.

A comparison on several traces (scenes) has these for every scene, and a combined report of all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import asdict

from pic_bench.compare.pairing import Pair, pair_records
from pic_bench.compare.run_folder import Run, load_run, load_scenes
from pic_bench.compare.summary import Paired, ScenesSummary, Summary
from pic_bench.out_folder import scenes_of
from pic_bench.report.markdown import Table
from pic_bench.report.numbers import JINJA, table_of, times
from pic_bench.report.page import render_text, write_pages

MAX_LISTED = 12
MAX_ANSWER_CHARS = 1500
_COLUMNS: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("columns.toml").read_text("utf8"))


def write_all(folder: Path) -> list[Run]:
    """Write the reports of a comparison, on one trace or on several; returns the run of each trace.

    Raises:
        BenchError: if the folder is no finished comparison.
    """
    runs = {scene: _write_run(folder / scene) for scene in scenes_of(folder)}
    if not runs:
        return [_write_run(folder)]
    summaries = {name: run.summary for name, run in runs.items()}
    first, *_ = runs.values()
    title = f"{' and '.join(one.trace.name for one in summaries.values())} on {first.summary.model.name}"
    write_pages(
        folder,
        ScenesSummary(scenes=summaries),
        "scenes.md.j2",
        title,
        runs=runs,
        table=_by_scene("scenes", summaries.values()),
        environment=first.environment,
    )
    return list(runs.values())


def headline(folder: Path) -> str:
    """The first lines of a comparison's report, for a terminal."""
    runs = load_scenes(folder)
    if runs:
        return _closing_lines(runs)
    summary = load_run(folder).summary
    return render_text("overview.md.j2", summary=summary, **_tables(summary))


def _write_run(folder: Path) -> Run:
    run = load_run(folder)
    summary, paired = run.summary, run.summary.paired
    title = f"{summary.trace.name} on {summary.model.name}"
    counters = [[key, name, f"{n:g}"] for name, arm in summary.arms.items() for key, n in arm.pic_counters.items()]
    write_pages(
        folder,
        summary,
        "comparison.md.j2",
        title,
        **_tables(summary),
        config=run.config,
        environment=run.environment,
        counters=Table(["counter", "arm", "value"], counters),
        around=_around,
        buckets=_buckets(paired) if paired else None,
        request_lists=_request_lists(run, paired) if paired else {},
    )
    return run


def _tables(summary: Summary) -> dict[str, object]:
    arms = ({"name": name, **asdict(arm)} for name, arm in summary.arms.items())
    others = ({**asdict(pair), "noise_floor": summary.noise_floor} for pair in summary.comparisons)
    return {
        "paired": summary.paired,
        "floor": summary.floor,
        "arms": table_of(_COLUMNS["arms"], arms),
        "comparisons": _named("comparisons", others, summary.comparisons[0]) if summary.comparisons else None,
    }


def _buckets(paired: Paired) -> Table:
    found = (*paired.by_chunk_hit_tokens, *paired.at_least_chunk_hit_tokens)
    header, rows = _named("buckets", map(asdict, found), paired)
    return Table(header, [row for i, row in enumerate(rows) if row not in rows[:i]])


def _named(name: str, rows: Iterable[Mapping[str, object]], pair: Paired) -> Table:
    """A table whose titles name the arms of a pair."""
    columns = {title.format(baseline=pair.baseline, arm=pair.arm): cell for title, cell in _COLUMNS[name].items()}
    return table_of(columns, rows)


def _request_lists(run: Run, paired: Paired) -> dict[str, Sequence[Pair]]:
    pairs = pair_records(run.records[paired.baseline], run.records[paired.arm])
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
    """The last lines for a terminal: the tokens that every scene saves, and the share of equal answers."""
    table = _by_scene("closing", [run.summary for run in runs.values()])
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    model, environment = next((run.summary.model, run.environment) for run in runs.values())
    machine = "; ".join(environment.gpus) or f"{environment.num_cpus} CPUs"
    where = ", ".join(filter(None, (model.name, model.dtype, machine)))
    return "\n".join([*lines, f"{where}. Spliced answers are approximate; requests with `mode: off` are exact."])


def _by_scene(name: str, scenes: Iterable[Summary]) -> Table:
    """A row per figure, a column per scene."""
    columns = _COLUMNS[name]
    header, figures = [""], [[*columns]]
    for scene in scenes:
        header.append(scene.trace.name)
        rows = [{**asdict(scene.paired), "arms": scene.arms}] if scene.paired else []
        figures += table_of(columns, rows).rows or [["not compared"] * len(columns)]
    return Table(header, [list(row) for row in zip(*figures, strict=True)])


JINJA.filters |= {
    "faster": lambda of: f"{times(of.ttft_speedup_p50)} (n={of.requests})" if of.requests else "-",
    "kl": lambda of: f"{of.p50:.1e} / {of.p99:.1e}" if of else "-",
}
