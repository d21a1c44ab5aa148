"""The hits by pool size as a picture: an SVG in the colours of all pages, for light and dark grounds."""

from __future__ import annotations

import math
from importlib.resources import files

from sglang_pic.census.pools import KNEE, Pools

_WIDTH, _HEIGHT = 680, 330
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 44, 646, 272
_STYLE = """svg { background: var(--ground); font: 14px Helvetica, Arial, sans-serif }
text { fill: var(--ink) } .soft { fill: var(--muted) } .bold { font-weight: bold }
.computed { fill: var(--computed) } .spliced { fill: var(--spliced) } .prefix { fill: var(--prefix) }
.middle { text-anchor: middle } .end { text-anchor: end } line { stroke: var(--ink); stroke-dasharray: 5 4 }"""


def picture(pools: Pools) -> str:
    """The shares of prompt tokens by their source over the sizes that were counted; the knee is marked."""
    counted = [pool for pool in pools.pools if pool.tokens is not None]
    low, high = (int(pool.tokens or 0) for pool in (counted[0], counted[-1]))

    def x(size: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * math.log(size / low) / math.log(high / low):.1f}"

    def y(tokens: float) -> str:
        return f"{_BOTTOM - (_BOTTOM - _TOP) * tokens / pools.prompt_tokens:.1f}"

    title = "Prompt tokens by their source, by the tokens of the KV pool"
    palette = (files("sglang_pic.explain") / "assets/palette.css").read_text(encoding="utf-8")
    parts = [f"<style>{palette}{_STYLE}</style>", f'<text class="bold" x="{_LEFT}" y="18">{title}</text>']
    tops = {
        "computed": [pools.prompt_tokens for _ in counted],
        "spliced": [pool.hits for pool in counted],
        "prefix": [pool.prefix_tokens for pool in counted],
    }
    # Each area reaches down to 0, under those of the sources after it.
    for place, (source, tokens) in enumerate(tops.items()):
        line = " ".join(f"{x(pool.tokens or 0)},{y(top)}" for pool, top in zip(counted, tokens, strict=True))
        parts.append(f'<polygon class="{source}" points="{_LEFT},{_BOTTOM} {line} {_RIGHT},{_BOTTOM}"/>')
        left = _LEFT + 130 * place
        parts.append(f'<rect class="{source}" x="{left}" y="{_HEIGHT - 28}" width="14" height="14"/>')
        parts.append(f'<text x="{left + 20}" y="{_HEIGHT - 16}">{source}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text class="soft end" x="{_LEFT - 6}" y="{y(share * pools.prompt_tokens)}">{share:.0%}</text>')
    for pool in counted:
        at = x(pool.tokens or 0)
        parts.append(f'<text class="soft middle" x="{at}" y="{_BOTTOM + 18}">{pool.tokens:,}</text>')
    if knee := pools.knee:
        parts.append(f'<line x1="{x(knee)}" x2="{x(knee)}" y1="{_TOP - 4}" y2="{_BOTTOM}"/>')
        parts.append(f'<text class="middle" x="{x(knee)}" y="{_TOP - 8}">{KNEE:.0%} of an unlimited cache</text>')
    frame = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:100%;height:auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img">{"".join(parts)}</svg>\n'
