"""The frontier of the paired experiment as a picture: what each arm computes, and how far it is from a full prefill."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from pic_bench.report.page import THEME, render_text
from pic_bench.report.stats import MOST_KL

WIDTH, HEIGHT = 330, 300
"""Of a panel's plot, in pixels."""
_LINE: Final = 14
"""Height of a text."""
_MOST_RIGHT: Final = 0.45
"""Computed share of an arm whose text is on its right."""
LEAST_KL, LARGEST_KL = 1e-5, 3.0
"""The range of the logarithmic axis, nats a token; smaller ones are drawn at its end."""
_EVERYWHERE: Final = {"exact": "exact hits", "seam-64": "default"}
_BOLD: Final = {"most": "most", "unrotated": "not rotated"}
_AGENTS: Final = {"tokens": "random tokens", "any-text": "after any text", **_BOLD}
_DOCUMENTS: Final = {"any-order": "in any order", "block-1": "one block whole", "random": "random blocks", **_BOLD}
_TAIL: Final = {
    "tail-64": "tail of 64",
    "attended-32": "attended",
    "differing-1": "differing",
    "tokens": "random tokens",
}


class Panel(NamedTuple):
    """One plot."""

    title: str
    record: str
    kinds: Sequence[str]
    """Whose prompts are one set."""
    arms: Mapping[str, str]
    """Beside those of all panels, by the record's name: as the study's tables call them."""


PANELS: Final = tuple(
    Panel(f"{title}, {model.upper()}", record.format(model), kinds, arms)
    for model, tail in (("0.5b", "Qwen2.5-Coder-0.5B, other orders"), ("1.5b", "Qwen2.5-Coder-1.5B"))
    for title, record, kinds, arms in (
        ("calls of four agents", "paired/qwen2.5-coder-{}.json", ("four agents",), _AGENTS),
        ("documents in another order", "paired/qwen2.5-coder-{}.json", ("order", "drawn"), _DOCUMENTS),
        ("calls with a shorter tail", "paired/short-tail.json", (tail,), _TAIL),
    )
)


class Point(NamedTuple):
    """An arm in a panel, at pixels of its plot."""

    x: float
    y: float
    text: str
    text_y: float
    is_default: bool
    is_left: bool
    """Whether the text is on its left."""


def picture(records: Mapping[str, Any]) -> str:
    """The SVG; `records` are the experiment's summaries by their names in bench/results."""
    panels = [(panel.title, [*_points(records[panel.record]["losses"], panel)]) for panel in PANELS]
    ticks = [(f"{kl:g}", _y(kl)) for kl in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    plots = {"panels": panels, "ticks": ticks, "bar": _y(MOST_KL), "width": WIDTH, "height": HEIGHT}
    return render_text("frontier.svg.j2", theme=Markup(THEME), **plots)


def read(results: Path) -> dict[str, Any]:
    """The records that the picture shows, from the folder of results."""
    return {name: json.loads((results / name).read_text("utf8")) for name in {panel.record for panel in PANELS}}


def _points(losses: Sequence[Mapping[str, Any]], panel: Panel) -> Iterator[Point]:
    """The arms of a panel; their texts do not overlap."""
    points = []
    for arm, name in {**_EVERYWHERE, **panel.arms}.items():
        found = [loss for loss in losses if loss["kind"] in panel.kinds and loss["arm"] == arm]
        num = sum(loss["prompts"] for loss in found)
        if num:
            computed, kl = (sum(loss[of] * loss["prompts"] for loss in found) / num for of in ("computed", "kl"))
            lost = sum(loss["lost"] for loss in found)
            points.append((_y(kl), computed, f"{name}: {lost} of {num}", arm == "seam-64"))
    highest = {True: math.inf, False: math.inf}
    for y, computed, text, is_default in sorted(points, reverse=True):
        is_left = computed > _MOST_RIGHT
        highest[is_left] = min(y + 4, highest[is_left] - _LINE)
        yield Point(computed * WIDTH, y, text, highest[is_left], is_default, is_left)


def _y(kl: float) -> float:
    share = math.log(max(kl, LEAST_KL) / LEAST_KL) / math.log(LARGEST_KL / LEAST_KL)
    return HEIGHT * (1 - share)
