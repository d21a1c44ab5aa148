"""Owns the four pictures of a comparison, as SVG that takes its colours from the page or from its own theme.

It must not know files or tables: it gets arms, pairs and comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pic_bench.compare.pairing import Pair
from pic_bench.compare.summary import ArmSummary, Paired
from pic_bench.report import svg
from pic_bench.report.stats import median

__all__ = ["CHART_STYLE", "agreement", "poster", "speedup_scatter", "token_sources", "ttft_ecdf"]

WIDTH = 540.0
SOURCES = (
    ("prefix", "prefix hit", "served from the radix tree, from position 0"),
    ("chunk", "chunk hit", "spliced from another position"),
    ("computed", "computed", "prefilled by the model"),
)
DASHES = {"stock": "", "stock-again": "5 4", "stock-cold": "1 3", "pic": "", "pic-off": "2 3"}

CHART_STYLE = """
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--ink)}
svg .label{font-size:13px}svg .strong{font-size:13px;font-weight:650}svg .small{font-size:12px;fill:var(--muted)}
svg .title{font-size:16px;font-weight:650}svg .sub{font-size:12.5px;fill:var(--muted)}
svg .inbar{font-size:12.5px;font-weight:600}
svg .grid{stroke:var(--rule);stroke-width:1}svg .axis{stroke:var(--muted);stroke-width:1}
svg .unit{stroke:var(--muted);stroke-width:1.4;stroke-dasharray:4 4}
svg .median{stroke:var(--ink);stroke-width:2.4;stroke-linecap:round}
"""


def token_sources(arms: Mapping[str, ArmSummary]) -> str:
    """Stacked bars: where each arm's prompt tokens came from, all on one scale."""
    body, height = _token_rows(arms, WIDTH)
    return svg.document(body, WIDTH, height, "Prompt tokens by source for each arm")


def ttft_ecdf(arms: Mapping[str, ArmSummary], ttfts: Mapping[str, Sequence[float]]) -> str:
    """The share of requests whose first token came within a time, one step line per arm, logarithmic in time."""
    body, height = _ecdf(arms, ttfts, WIDTH, 330.0)
    return svg.document(body, WIDTH, height, "Distribution of time to first token for each arm")


def speedup_scatter(pairs: Sequence[Pair], paired: Paired) -> str:
    """TTFT speedup of every paired request against its chunk-hit tokens, log-log, with the median of each bucket."""
    height, left, right, top, bottom = 330.0, 58.0, WIDTH - 14, 30.0, 280.0
    points = [(pair, s) for pair in pairs if (s := pair.speedup) is not None and s > 0]
    if not points:
        return _empty("no paired requests", height)
    most = max(1000.0, max(float(pair.arm.chunk_hit_tokens or 0) for pair, _ in points) * 1.15)
    ys = svg.Scale(
        min(0.5, *(s for _, s in points)) / 1.08, max(2.0, *(s for _, s in points)) * 1.08, bottom, top, log=True
    )
    strip = left + 54  # requests with no chunk hit have no place on a logarithm: they get a strip of their own
    xs = svg.Scale(16.0, most, strip + 18, right, log=True)
    parts = [svg.text(left - 44, 14, "TTFT of stock / TTFT of pic", style="small")]
    for tick in svg.log_ticks(ys.low, ys.high):
        parts.append(svg.line(left, ys(tick), right, ys(tick)))
        parts.append(svg.text(left - 8, ys(tick) + 4, f"{tick:g}x", style="small", anchor="end"))
    for tick in svg.log_ticks(xs.low, xs.high, most=8):
        parts.append(svg.line(xs(tick), bottom, xs(tick), bottom + 4, style="axis"))
        parts.append(svg.text(xs(tick), bottom + 19, svg.count(tick), style="small", anchor="middle"))
    middle = (left + strip) / 2
    parts.append(svg.text(middle, bottom + 19, "none", style="small", anchor="middle"))
    parts.append(svg.line(strip + 4, top, strip + 4, bottom, style="grid"))
    parts.append(svg.line(left, ys(1.0), right, ys(1.0), style="unit"))
    for number, (pair, speedup) in enumerate(points):
        tokens = pair.arm.chunk_hit_tokens or 0
        spot = (number * 0.618034) % 1.0  # a fixed low-discrepancy spread instead of random jitter
        x = xs(float(tokens)) if tokens else left + 8 + (strip - left - 14) * spot
        parts.append(svg.shape("dot", x, ys(speedup), 3.4, "pic", title=_pair_title(pair), opacity=0.5))
    parts += _bucket_medians(paired, xs, ys, (left + 4, strip))
    parts.append(
        svg.text((strip + right) / 2, bottom + 38, "chunk-hit tokens of the request", style="small", anchor="middle")
    )
    return svg.document("".join(parts), WIDTH, height, "Speedup of time to first token against chunk-hit tokens")


def agreement(comparisons: Sequence[Paired], floor: Paired | None) -> str:
    """Bars: share of paired requests with the same first token and the same whole answer as the baseline."""
    shown = [pair for pair in comparisons if pair != floor]
    if not shown:  # stock against stock only: the floor itself is the figure
        shown, floor = list(comparisons), None
    rows = [
        (what, pair, share)
        for what, field in (("same first token", "first_token_agreement"), ("same whole answer", "output_agreement"))
        for pair in shown
        if (share := _share_of(pair, field)) is not None
    ]
    if not rows:
        return _empty("no agreement was measured", 120.0)
    left, right, step = 150.0, WIDTH - 66, 48.0
    xs = svg.Scale(0.0, 1.0, left, right)
    parts, y = [], 14.0
    for what, pair, share in rows:
        parts.append(svg.text(0, y + 13, what, style="strong"))
        parts.append(svg.text(0, y + 29, f"{pair.arm} = {pair.baseline}", style="small"))
        parts.append(svg.rect(left, y + 3, right - left, 24, "panel", radius=3))
        parts.append(
            svg.rect(
                left,
                y + 3,
                xs(share) - left,
                24,
                _kind(pair.arm),
                title=f"{svg.percent(share)} of {pair.requests}",
                radius=3,
            )
        )
        parts.append(svg.text(right + 8, y + 20, svg.percent(share), style="strong"))
        base = _share_of(floor, "first_token_agreement" if "first" in what else "output_agreement")
        if base is not None and floor is not None:
            x = xs(base)
            parts.append(svg.line(x, y - 2, x, y + 32, style="median"))
        y += step
    measured = any(_kind(pair.arm).startswith("stock") for pair in shown)
    note = "" if measured else "no second stock arm: the noise floor was not measured"
    if floor is not None:
        note = f"upright line: noise floor ({floor.arm} = {floor.baseline}): "
        note += f"{svg.percent(floor.first_token_agreement)} and {svg.percent(floor.output_agreement)}"
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(svg.text(xs(tick), y + 12, f"{tick:.0%}", style="small", anchor="middle"))
    parts.append(svg.text(0, y + 36, note, style="small"))
    return svg.document("".join(parts), WIDTH, y + 46, "Agreement of answers with the baseline")


def poster(title: str, subtitle: str, arms: Mapping[str, ArmSummary], ttfts: Mapping[str, Sequence[float]]) -> str:
    """The picture for a README: token sources above TTFT distributions, with its own light and dark theme."""
    width, pad = 760.0, 24.0
    bars, bars_height = _token_rows(arms, width - 2 * pad)
    curve, curve_height = _ecdf(arms, ttfts, width - 2 * pad, 290.0)
    second = 92 + bars_height + 38
    height = second + curve_height + 12
    style = f"<style>{svg.theme('svg')}{CHART_STYLE}</style>"
    body = [
        style,
        svg.rect(0, 0, width, height, "ground", radius=10),
        svg.text(pad, 34, title, style="title"),
        svg.text(pad, 54, subtitle, style="sub"),
        svg.text(pad, 82, "Where the prompt tokens came from", style="strong"),
        f'<g transform="translate({pad:g},92)">{bars}</g>',
        svg.text(pad, second - 10, "Time to first token", style="strong"),
        f'<g transform="translate({pad:g},{second:g})">{curve}</g>',
    ]
    return svg.document("".join(body), width, height, f"{title}. {subtitle}")


def _token_rows(arms: Mapping[str, ArmSummary], width: float) -> tuple[str, float]:
    left, right, step, bar = 96.0, width - 4, 56.0, 30.0
    most = max(1, *(arm.prompt_tokens for arm in arms.values()))
    xs = svg.Scale(0.0, float(most), left, right)
    parts, x = [], left
    for colour, label, _ in SOURCES:
        parts.append(svg.rect(x, 4, 12, 12, colour, radius=2))
        parts.append(svg.text(x + 18, 15, label, style="small"))
        x += 40 + 7 * len(label)
    y = 28.0
    for name, arm in arms.items():
        parts.append(svg.text(0, y + 20, name, style="strong"))
        tokens = (arm.prefix_hit_tokens, arm.chunk_hit_tokens, arm.computed_tokens)
        start = 0.0
        for (colour, label, meaning), amount in zip(SOURCES, tokens, strict=True):
            x0, x1 = xs(start), xs(start + amount)
            share = amount / arm.prompt_tokens if arm.prompt_tokens else 0.0
            tip = f"{name}: {amount:,} tokens ({share:.1%}) {label}: {meaning}"
            # One unit of ground between the segments keeps them apart without colour.
            parts.append(svg.rect(x0, y, x1 - x0 - (1.0 if x1 - x0 > 2 else 0.0), bar, colour, title=tip))
            if x1 - x0 > 52:
                parts.append(
                    svg.text(
                        (x0 + x1) / 2, y + 20, svg.percent(share), style="inbar", anchor="middle", fill=f"on-{colour}"
                    )
                )
            start += amount
        facts = " · ".join(f"{label} {svg.count(n)}" for (_, label, _), n in zip(SOURCES, tokens, strict=True) if n)
        parts.append(
            svg.text(left, y + bar + 15, f"{svg.count(arm.prompt_tokens)} prompt tokens: {facts}", style="small")
        )
        y += step
    return "".join(parts), y + 2


def _ecdf(
    arms: Mapping[str, ArmSummary], ttfts: Mapping[str, Sequence[float]], width: float, height: float
) -> tuple[str, float]:
    values = {name: sorted(v for v in ttfts.get(name, ()) if v > 0) for name in arms}
    every = [v for series in values.values() for v in series]
    if not every:
        return svg.text(0, 30, "no request was answered", style="small"), 50.0
    left, right, bottom = 46.0, width - 14, height - 48
    legend, rows = _legend({name: median(series) for name, series in values.items() if series}, left, right)
    top = 14.0 + 20.0 * rows
    low, high = min(every) / 1.1, max(every) * 1.1
    xs, ys = svg.Scale(low, high, left, right, log=True), svg.Scale(0.0, 1.0, bottom, top)
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(svg.line(left, ys(share), right, ys(share)))
        parts.append(svg.text(left - 8, ys(share) + 4, f"{share:.0%}", style="small", anchor="end"))
    for tick in svg.log_ticks(low, high, most=8):
        parts.append(svg.line(xs(tick), bottom, xs(tick), bottom + 4, style="axis"))
        parts.append(svg.text(xs(tick), bottom + 19, _tick_time(tick), style="small", anchor="middle"))
    for name, series in values.items():
        if not series:
            continue
        points = [(xs(series[0]), ys(0.0))]
        for rank, value in enumerate(series, start=1):
            points += [(xs(value), points[-1][1]), (xs(value), ys(rank / len(series)))]
        colour = _kind(name)
        parts.append(svg.polyline(points, colour, dash=DASHES[colour]))
        middle = median(series) or 0.0
        parts.append(svg.shape("ring", xs(middle), ys(0.5), 4.5, colour, title=f"{name}: median {svg.seconds(middle)}"))
    parts.append(legend)
    parts.append(
        svg.text(
            (left + right) / 2,
            bottom + 38,
            "time to first token (share of requests answered within)",
            style="small",
            anchor="middle",
        )
    )
    return "".join(parts), height


def _legend(medians: Mapping[str, float | None], left: float, right: float) -> tuple[str, int]:
    """A line sample, name and median per arm, wrapped to the width; returns the number of rows."""
    parts, x, row = [], left, 0
    for name, middle in medians.items():
        label = f"{name} {svg.seconds(middle)}"
        needed = 50 + 7.3 * len(label)
        if x + needed > right + 22 and x > left:
            x, row = left, row + 1
        y = 12.0 + 20.0 * row
        parts.append(svg.polyline([(x, y), (x + 22, y)], _kind(name), dash=DASHES[_kind(name)], width=3))
        parts.append(svg.text(x + 28, y + 4, label))
        x += needed
    return "".join(parts), row + 1


def _bucket_medians(paired: Paired, xs: svg.Scale, ys: svg.Scale, none: tuple[float, float]) -> list[str]:
    """A bar at each bucket's median speedup, across the bucket, with the figure above it."""
    parts = []
    for bucket in paired.by_chunk_hit_tokens:
        if bucket.ttft_speedup_p50 is None:
            continue
        y = ys(bucket.ttft_speedup_p50)
        x0, x1 = none if bucket.low == 0 else (xs(float(bucket.low)), xs(float(bucket.high or xs.high)))
        parts.append(svg.line(x0 + 2, y, x1 - 2, y, style="median"))
        label = svg.times(bucket.ttft_speedup_p50)
        parts.append(
            f'<text x="{(x0 + x1) / 2:.1f}" y="{y - 7:.1f}" class="strong" text-anchor="middle" '
            f'style="paint-order:stroke;stroke:var(--ground);stroke-width:4px">{label}</text>'
        )
    return parts


def _pair_title(pair: Pair) -> str:
    base, arm = svg.seconds(pair.base.ttft_s), svg.seconds(pair.arm.ttft_s)
    tokens = f"{pair.arm.chunk_hit_tokens or 0:,} chunk-hit of {pair.arm.prompt_tokens or 0:,} prompt tokens"
    return f"{pair.arm.session_id} call {pair.arm.call}: {tokens}, {base} → {arm} ({svg.times(pair.speedup)})"


def _share_of(pair: Paired | None, field: str) -> float | None:
    if pair is None:
        return None
    return pair.first_token_agreement if field == "first_token_agreement" else pair.output_agreement


def _kind(name: str) -> str:
    """The arm's kind from its name, `pic-2` -> `pic`."""
    # Longest first: `stock-again-2` begins with `stock` too.
    return next((kind for kind in sorted(DASHES, key=len, reverse=True) if name.startswith(kind)), "stock")


def _tick_time(tick: float) -> str:
    return f"{tick * 1000:g} ms" if tick < 1 else f"{tick:g} s"


def _empty(message: str, height: float) -> str:
    return svg.document(svg.text(0, 30, message, style="small"), WIDTH, height, message)
