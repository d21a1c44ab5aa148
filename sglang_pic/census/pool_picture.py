"""The hits by pool size as a picture: an SVG in the colours of all pages, for light and dark grounds."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from sglang_pic.census.pools import PoolCurve, Pools

_WIDTH, _HEIGHT = 680, 330
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 44, 664, 272
_STYLE = """svg { background: var(--ground); font: 14px Helvetica, Arial, sans-serif }
text { fill: var(--ink) } .soft { fill: var(--muted) } .bold { font-weight: bold }
.computed { fill: var(--computed) } .spliced { fill: var(--spliced) } .prefix { fill: var(--prefix) }
.middle { text-anchor: middle } .end { text-anchor: end } line { stroke: var(--ink); stroke-dasharray: 5 4 }"""
_SOURCES = ("prefix", "spliced", "computed")


def picture(curve: PoolCurve, pools: Pools, pool: int) -> str:
    """The shares of prompt tokens by their source over the pool's size, with `pool` and the knee marked."""
    marks = {"--pool": pool, "knee": max(1, pools.knee_tokens)}
    low, high = max(1, min(marks.values()) // 8), 2 * max(curve.least_pool(1), *marks.values())
    sizes = np.geomspace(low, high, 240)

    def x(size: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * np.log(size / low) / np.log(high / low):.1f}"

    def y(share: float) -> str:
        return f"{_BOTTOM - (_BOTTOM - _TOP) * share:.1f}"

    hits = np.array([curve.hits(int(size)) for size in sizes]) / pools.prompt_tokens
    tops = np.column_stack([hits.cumsum(axis=1), np.ones(len(sizes))])
    title = "Prompt tokens by their source, by the tokens of the KV pool"
    parts = [f"<style>{_palette()}{_STYLE}</style>", f'<text class="bold" x="{_LEFT}" y="18">{title}</text>']
    # Each area reaches down to 0, under those of the sources before it.
    for place, source in reversed([*enumerate(_SOURCES)]):
        line = " ".join(f"{x(size)},{y(share)}" for size, share in zip(sizes, tops[:, place], strict=True))
        parts.append(f'<polygon class="{source}" points="{_LEFT},{_BOTTOM} {line} {_RIGHT},{_BOTTOM}"/>')
        left = _LEFT + 130 * place
        parts.append(f'<rect class="{source}" x="{left}" y="{_HEIGHT - 28}" width="14" height="14"/>')
        parts.append(f'<text x="{left + 20}" y="{_HEIGHT - 16}">{source}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text class="soft end" x="{_LEFT - 6}" y="{y(share)}">{share:.0%}</text>')
    doublings = np.log2(high / low)
    for by in range(0, int(doublings), 2 if doublings > 6 else 1):
        parts.append(f'<text class="soft middle" x="{x(low << by)}" y="{_BOTTOM + 18}">{low << by:,}</text>')
    for name, size in marks.items():
        parts.append(f'<line x1="{x(size)}" x2="{x(size)}" y1="{_TOP - 4}" y2="{_BOTTOM}"/>')
        parts.append(f'<text class="middle" x="{x(size)}" y="{_TOP - 8}">{name}</text>')
    frame = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img">{"".join(parts)}</svg>\n'


def _palette() -> str:
    return (files("sglang_pic.explain") / "assets/palette.css").read_text(encoding="utf-8")
