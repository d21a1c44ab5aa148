"""The pictures of a comparison: where tokens came from, times to first token, scenes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pic_bench.compare.summary import ArmSummary, Summary
from pic_bench.report.figures import Drawing, colour, drawing, log_ticks, place
from pic_bench.report.numbers import count, percent, seconds, times
from pic_bench.report.stats import median, ratio

WIDTH = 540.0
SOURCES = (
    ("prefix", "prefix_hit_tokens", "prefix hit", "served from the radix tree, from position 0"),
    ("spliced", "chunk_hit_tokens", "spliced", "rows of another position"),
    ("computed", "computed_tokens", "computed", "prefilled by the model"),
)
DASHES = {"stock": "-", "stock-again": "--", "stock-cold": ":", "pic": "-", "pic-off": "-."}


def poster(arms: Mapping[str, ArmSummary], ttfts: Mapping[str, Sequence[float]]) -> Drawing:
    """Stacked bars of where each arm's prompt tokens came from, above the distributions of time to first token."""
    width, bars = 600.0, 46.0 * len(arms)
    legend = 20.0 * ((len(arms) + 2) // 3)
    height = 64 + bars + 62 + legend + 250
    with drawing("Prompt tokens by source, and time to first token", width, height) as (drawn, figure):
        over = place(figure, left=96, top=60, right=6, bottom=height - 64 - bars)
        _draw_sources(over, arms)
        over.set_title("Where the prompt tokens came from", x=-96 / (width - 102), pad=30)
        under = place(figure, left=52, top=height - 242, right=14, bottom=50)
        _draw_ecdf(under, arms, ttfts)
        under.set_title("Time to first token", x=-52 / (width - 66), pad=14 + legend)
    return drawn


def scenes(summaries: Sequence[Summary]) -> Drawing:
    """For every scene: tokens computed and TTFT, stock against patched, and how many answers begin alike."""
    label, width, height = "Stock against patched, scene by scene", 820.0, 56.0 + 92 * len(summaries)
    with drawing(label, width, height) as (drawn, figure):
        places = {"Tokens computed": (170, 400), "Median TTFT, 2nd call on": (450, 132)}
        panels = [place(figure, left=left, right=right, top=44, bottom=4) for left, right in places.values()]
        for axes, title in zip(panels, places, strict=True):
            axes.set(yticks=[], xticks=[], ylim=(len(summaries) - 0.5, -0.5))
            axes.spines["bottom"].set_visible(False)
            axes.set_title(title, pad=14)
        figure.text(700 / width, 1 - 30 / height, "Same 1st token", weight="bold", size=13)
        for row, summary in enumerate(summaries):
            # Rows are 92 pixels high.
            middle = 1 - (44 + 92 * (row + 0.5)) / height
            calls = f"{summary.trace.calls} calls of {summary.trace.sessions} sessions"
            figure.text(0, middle + 2 / height, fill(summary.trace.name, 22), weight="bold", va="bottom")
            figure.text(0, middle - 3 / height, calls, color=colour("muted"), size=11, va="top")
            paired = summary.paired
            if paired is None:
                continue
            later = paired.from_second_call
            stock, patched = (summary.arms[name].computed_tokens for name in (paired.baseline, paired.arm))
            share = f"patched {count(patched)}, {percent(paired.computed_tokens_ratio, 0)}"
            _bar_pair(panels[0], row, ratio(patched, stock), (f"stock {count(stock)}", share))
            base, arm = later.baseline_ttft_p50_s, later.ttft_p50_s
            speedup = f"{seconds(arm)}, {times(later.ttft_speedup_p50)}"
            _bar_pair(panels[1], row, ratio(arm or 0.0, base or 0.0), (seconds(base), speedup))
            figure.text(700 / width, middle, percent(paired.first_token_agreement), size=20, weight="bold", va="center")
    return drawn


def _bar_pair(axes: Axes, row: int, patched: float | None, labels: tuple[str, str]) -> None:
    """Stock's bar, which is 1 long, above the patched server's."""
    for aside, kind, length, label in zip((-0.17, 0.17), ("stock", "pic"), (1.0, patched or 0.0), labels, strict=True):
        axes.barh(row + aside, length, height=0.3, color=colour(kind))
        gap, side, ink = (-6, "right", "ground") if length > 0.55 else (6, "left", "ink")
        words: dict[str, Any] = {"ha": side, "va": "center", "color": colour(ink), "weight": "bold"}
        axes.annotate(label, (length, row + aside), xytext=(gap, 0), textcoords="offset points", **words)
    axes.set_xlim(0, max(1.0, axes.get_xlim()[1] if row else 1.0, patched or 0.0))


def _draw_sources(axes: Axes, arms: Mapping[str, ArmSummary]) -> None:
    names, start = list(arms), np.zeros(len(arms))
    totals = [max(1, arm.prompt_tokens) for arm in arms.values()]
    for name, field, label, meaning in SOURCES:
        amounts = np.array([getattr(arm, field) for arm in arms.values()])
        bars = axes.barh(names, amounts, left=start, height=0.62, color=colour(name), label=label)
        inside = []
        for bar, arm, amount, total in zip(bars, names, amounts, totals, strict=True):
            bar.set_url(f"{arm}: {amount:,} tokens ({amount / total:.1%}) {label}: {meaning}")
            # A bar that is too narrow for a figure has it in its tooltip and in the table.
            inside.append(percent(amount / total) if amount > 0.09 * max(totals) else "")
        axes.bar_label(bars, inside, label_type="center", color=colour(f"on-{name}"), fontweight="bold")
        start += amounts
    axes.set_yticks(range(len(names)), [f"{name}\n{count(arm.prompt_tokens)} tokens" for name, arm in arms.items()])
    axes.tick_params("y", labelcolor=colour("ink"), pad=90)
    for text in axes.get_yticklabels():
        text.set_horizontalalignment("left")
    axes.set(xlim=(0, max(totals)), ylim=(len(names) - 0.5, -0.5), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), handlelength=1, handleheight=1)


def _draw_ecdf(axes: Axes, arms: Mapping[str, ArmSummary], ttfts: Mapping[str, Sequence[float]]) -> None:
    """The share of requests whose first token came within a time, a step line per arm, logarithmic in time."""
    series = {name: found for name in arms if (found := [v for v in ttfts.get(name, ()) if v > 0])}
    if not series:
        axes.set_axis_off()
        axes.text(0, 0.5, "no request was answered", color=colour("muted"))
        return
    for name, values in series.items():
        kind, middle = arms[name].kind.value, median(values) or 0.0
        label = f"{name} {seconds(middle)}"
        axes.ecdf(values, label=label, linewidth=2.2, color=colour(kind), linestyle=DASHES[kind])
        (ring,) = axes.plot(middle, 0.5, "o", ms=8, mec=colour(kind), mfc=colour("ground"), mew=2)
        ring.set_url(f"{name}: median {seconds(middle)}")
    every = [value for values in series.values() for value in values]
    axes.set_xlim(min(every) / 1.1, max(every) * 1.1)
    log_ticks(axes, "x", lambda tick: f"{tick * 1000:g} ms" if tick < 1 else f"{tick:g} s", most=8)
    axes.set(ylim=(0, 1.01), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:.0%}")
    axes.set_xlabel("time to first token (share of requests answered within)")
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.01))
