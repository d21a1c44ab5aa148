"""Simulated hours as text for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

from rich.console import RenderableType
from rich.table import Table

from pic_bench.simulate.lasting import Lasting, Window
from pic_bench.simulate.trend import Trend
from sglang_pic.census.table import as_text, percent, ratio, shown_tokens

_Tiers: TypeAlias = list[tuple[str, Callable[[Window], tuple[int, int]]]]


def render(result: Lasting) -> str:
    """The windows as a table, and below it whether the gain lasts."""
    table = Table(box=None, pad_edge=False)
    headers = ("minutes", "calls", "tokens", "prefix", "chunk", "recovered", "of unlimited")
    for header in headers:
        table.add_column(header, justify="right")
    for number, window in enumerate(result.windows):
        table.add_row(f"{number * result.window_s / 60:g}", *_window_cells(window))
    trends = result.trends
    told: list[RenderableType] = [
        _trend("recovered", trends.recovered),
        _trend("of unlimited", trends.kept),
        *_beyond_the_pool(result),
    ]
    dealt = f", each call on one of {result.servers:,} servers" if result.servers > 1 else ""
    return as_text(
        f"{result.sessions:,} sessions start within {result.hours:g} h and pause {result.pause_s:g} s between calls"
        f"{dealt}. Of {shown_tokens(result.distinct_tokens)} distinct tokens the pool{' of each' if dealt else ''} "
        f"holds {shown_tokens(result.pool_tokens)}.",
        "",
        table,
        "",
        *told,
        "",
        f"{result.warmup_windows} windows, until the pool is full, do not count for a trend. recovered: chunk / (chunk "
        "+ new), the share of stock SGLang's computed tokens that is saved. of unlimited: prefix + chunk, as a share "
        "of the same of a cache without limit. Intervals: 95 %, by resampling windows.",
    )


def _beyond_the_pool(result: Lasting) -> list[RenderableType]:
    """What the pool, a host and a store serve behind the warm-up, by stock SGLang and by this cache."""
    counted = result.windows[result.warmup_windows :]
    total = sum(window.prompt_tokens for window in counted)
    tiers: _Tiers = [("pool", lambda w: (w.prefix_tokens, w.prefix_tokens + w.chunk_tokens))]
    if result.host_tokens:
        tiers.append(("host", lambda w: (w.host_prefix_tokens, w.host_prefix_tokens + w.host_chunk_tokens)))
    if result.has_store:
        tiers.append(("store", lambda w: (w.store_stock_tokens, w.store_prefix_tokens + w.store_chunk_tokens)))
    if len(tiers) == 1:
        return []
    table = Table(box=None, pad_edge=False)
    for header in ("", *(name for name, _ in tiers), "computed"):
        table.add_column(header, justify="right" if header else "left")
    for number, name in enumerate(("stock SGLang", "this cache")):
        served = [sum(tier(window)[number] for window in counted) for _, tier in tiers]
        parts = [more - less for less, more in itertools.pairwise([0, *served, total])]
        table.add_row(name, *(percent(ratio(part, total)) for part in parts))
    loaded = sum(window.store_loaded_tokens for window in counted)
    rest = [f"With a host of {shown_tokens(result.host_tokens)} tokens"] if result.host_tokens else []
    rest += [f"With a store, from which this cache loads {shown_tokens(loaded)} tokens"] if result.has_store else []
    title = f"{'. '.join(rest)}. Shares of the prompt tokens behind the warm-up, each beyond those to its left:"
    return ["", title, "", table]


def _window_cells(window: Window) -> list[str]:
    served = window.prefix_tokens + window.chunk_tokens
    return [
        f"{window.calls:,}",
        shown_tokens(window.prompt_tokens),
        percent(ratio(window.prefix_tokens, window.prompt_tokens)),
        percent(ratio(window.chunk_tokens, window.prompt_tokens)),
        percent(ratio(window.chunk_tokens, window.prompt_tokens - window.prefix_tokens)),
        percent(ratio(served, window.unlimited_prefix_tokens + window.unlimited_chunk_tokens)),
    ]


def _trend(name: str, trend: Trend | None) -> str:
    if trend is None:
        return f"{name}: too few windows with calls for a trend"
    change, slope = trend.change, trend.slope_per_hour
    return (
        f"{name}: {trend.first_half:.1%} in the first half, {trend.second_half:.1%} in the second "
        f"({100 * change.value:+.1f} points, {100 * change.low:+.1f} to {100 * change.high:+.1f}); "
        f"{100 * slope.value:+.2f} points an hour ({100 * slope.low:+.2f} to {100 * slope.high:+.2f}): "
        f"{'it falls' if trend.decays else 'it does not fall'}"
    )
