"""Owns writing a comparison's reports from its folder alone: report.md, report.html, report.svg.

It must not start or measure anything.
"""

from __future__ import annotations

from pathlib import Path

from pic_bench.compare.run_folder import Run, load_run
from pic_bench.compare.summary import write_json
from pic_bench.report.charts import poster
from pic_bench.report.markdown import markdown_report
from pic_bench.report.page import html_report
from pic_bench.report.svg import percent, times
from pic_bench.report.tables import plural

__all__ = ["write_reports"]


def write_reports(folder: Path) -> Run:
    """Write the summary and the three reports into the comparison's folder and return the run they show.

    Raises:
        BenchError: if the folder is no finished comparison.
    """
    run = load_run(folder)
    write_json(folder / "summary.json", run.summary)
    (folder / "report.md").write_text(markdown_report(run), "utf8")
    (folder / "report.html").write_text(html_report(run), "utf8")
    (folder / "report.svg").write_text(_poster(run), "utf8")
    return run


def _poster(run: Run) -> str:
    summary, paired = run.summary, run.summary.paired
    subtitle = f"{plural(summary.trace.calls, 'call')} of {plural(summary.trace.sessions, 'session')}"
    if paired is not None and paired.requests:
        subtitle += f"; {percent(paired.computed_tokens_ratio)} of stock's tokens computed, "
        subtitle += f"median TTFT {times(paired.ttft_speedup_p50)} faster"
    title = f"{summary.trace.name} on {summary.model.name}"
    return poster(title, subtitle, summary.arms, {name: run.ttfts(name) for name in summary.arms})
