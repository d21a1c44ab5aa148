"""Writes a comparison's reports from its folder alone: summary.json, report.md, report.html and report.svg."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pic_bench.compare.pairing import Pair
from pic_bench.compare.run_folder import Run, load_run
from pic_bench.compare.summary import Model, Paired
from pic_bench.out_folder import write_json
from pic_bench.report import charts
from pic_bench.report.numbers import percent, plural, seconds, times
from pic_bench.report.page import Picture, render_pages, render_text
from pic_bench.report.tables import arms_table, buckets_table, comparison_table, counters_table

__all__ = ["overview", "write_reports"]

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
    ttfts = {name: run.ttfts(name) for name in summary.arms}
    pictures = _pictures(run, ttfts)
    pages = render_pages("comparison.md.j2", title, pictures, **_overview_values(run), **_values(run))
    write_json(folder / "summary.json", summary)
    (folder / "report.md").write_text(pages.markdown, "utf8")
    (folder / "report.html").write_text(pages.html, "utf8")
    poster = charts.poster(summary.arms, ttfts)
    (folder / "report.svg").write_text(poster.standalone(title, _subtitle(run)), "utf8")
    return run


def overview(run: Run) -> str:
    """The top of the report: title, result and the two tables, as a person reads them in a terminal."""
    return render_text("overview.md.j2", **_overview_values(run))


class _Request(NamedTuple):
    """A paired request with both answers, each split where they part."""

    name: str
    same_output: bool
    first_differs: bool
    time: str
    tokens: str
    kl: float | None
    answers: list[tuple[str, str, str]]


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
        "model": _model(summary.model),
        "buckets": buckets_table(summary.paired) if summary.paired is not None else None,
        "counters": counters_table(run),
        "request_lists": _request_lists(run, summary.paired) if summary.paired is not None else [],
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


def _model(model: Model) -> str:
    parts = [model.name, model.architecture, model.dtype, f"{model.num_layers} layers" if model.num_layers else None]
    if model.num_attention_heads and model.num_kv_heads:
        parts.append(f"{model.num_attention_heads} query and {model.num_kv_heads} KV heads")
    if model.context_len:
        parts.append(f"context {model.context_len:,}")
    if model.weights_bytes:
        parts.append(f"{model.weights_bytes / 1e6:,.0f} MB")
    return ", ".join(part for part in parts if part)


def _pictures(run: Run, ttfts: dict[str, list[float]]) -> list[Picture]:
    summary, paired = run.summary, run.summary.paired
    drawn = charts.token_sources(summary.arms)
    found = [
        Picture("sources", "Where the prompt tokens came from", "Only the grey part is prefilled by the model.", drawn)
    ]
    if summary.comparisons:
        drawn = charts.agreement(summary.comparisons, summary.floor)
        note = "Greedy answers to the same prompts, against the baseline."
        found.append(Picture("agreement", "Do the answers agree?", note, drawn))
    drawn = charts.ttft_ecdf(summary.arms, ttfts)
    found.append(
        Picture("ttft", "Time to first token", "Further left is faster; rings and figures are medians.", drawn)
    )
    if paired is not None:
        drawn = charts.speedup_scatter(run.pairs(paired), paired)
        note = "One dot per paired request; bars are medians."
        found.append(Picture("speedup", "TTFT speedup by chunk-hit tokens", note, drawn))
    return found


def _request_lists(run: Run, paired: Paired) -> list[tuple[str, list[_Request]]]:
    pairs = run.pairs(paired)
    differing = sorted((p for p in pairs if not p.same_output), key=lambda p: (p.same_prefix_share, -(p.kl or 0.0)))
    slowest = sorted(pairs, key=lambda p: p.arm.ttft_s or 0.0, reverse=True)
    lists = (
        ("Requests whose answers differ most", differing),
        (f"Slowest requests of {paired.arm}", slowest),
    )
    return [
        (f"{title} ({min(len(some), MAX_LISTED)} of {len(some)})", [_request(p, paired) for p in some[:MAX_LISTED]])
        for title, some in lists
    ]


def _request(pair: Pair, paired: Paired) -> _Request:
    base, arm = pair.base, pair.arm
    tokens = f"{arm.prompt_tokens or 0:,} prompt = {arm.prefix_hit_tokens or 0:,} prefix"
    tokens += f" + {arm.chunk_hit_tokens or 0:,} chunk + {arm.computed_tokens or 0:,} computed"
    return _Request(
        name=f"{base.session_id} · call {base.call}",
        same_output=pair.same_output,
        first_differs=pair.same_first_token is False,
        time=f"TTFT {seconds(base.ttft_s)} → {seconds(arm.ttft_s)} ({times(pair.speedup)})",
        tokens=tokens,
        kl=pair.kl,
        answers=[
            (paired.baseline, *_around(base.output_text, pair.same_len)),
            (paired.arm, *_around(arm.output_text, pair.same_len)),
        ],
    )


def _around(text: str, same: int) -> tuple[str, str]:
    """What is the same and what differs of an answer, from somewhat before the place where the answers part."""
    start = max(0, same - MAX_ANSWER_CHARS // 2)
    end = start + MAX_ANSWER_CHARS
    before, after = text[start : min(same, end)], text[min(same, end) : end]
    rest = " …" if len(text) > end else ""
    return ("… " if start else "") + before + ("" if after else rest), after + (rest if after else "")
