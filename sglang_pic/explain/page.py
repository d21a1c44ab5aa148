"""The page: one HTML file with its style and no script, which may load nothing.

All text from logs is escaped. The page shows the most costly places and calls, so its size is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, PackageLoader

from sglang_pic.explain.cause import TEXTS
from sglang_pic.explain.grouping import Findings

ASSETS = files("sglang_pic.explain") / "assets"
"""`palette.css` has the colours of tokens by their source, for all pages and pictures."""
_CONTEXT_CHARS = 110
_NUM_PLACES = 20


def html_page(
    findings: Findings, title: str, encoder: str, gains: Sequence[tuple[str, int]] = (), *, is_exact: bool
) -> str:
    """The whole page.

    Args:
        findings: what it shows.
        title: names the calls, e.g. by their files.
        encoder: what counted the tokens.
        gains: bolder settings with the tokens that they would splice.
        is_exact: whether they are a model's own tokens.
    """
    loader = PackageLoader("sglang_pic.explain", "assets")
    assets = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    assets.filters |= {"short": _short, "visible": _visible, "nearest": _nearest}
    assets.globals |= {"percent": _percent, "num_places": _NUM_PLACES}
    causes = findings.ranked()
    return assets.get_template("page.html.j2").render(
        style="".join((ASSETS / name).read_text(encoding="utf-8") for name in ("palette.css", "page.css")),
        title=title,
        encoder=encoder,
        is_exact=is_exact,
        figures=findings.figures,
        gains=gains,
        costly=[one for one in causes if one.total.num_lost],
        harmless=[one for one in causes if not one.total.num_lost],
        num_lost=sum(one.total.num_lost for one in causes),
        words=TEXTS["words"],
    )


def _short(count: int) -> str:
    for unit, least, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if count >= least:
            return f"{count / size:.{0 if count >= 100 * size else 1}f} {unit}"
    return f"{count:,}"


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else None
    return "-" if share is None else f"{share:.{2 if 0 < share < 0.1 else 1}f} %"


def _visible(text: str) -> str:
    """Changed text with visible tabs and line ends, and visible spaces if it has nothing else."""
    shown = text.replace("\r", "␍").replace("\t", "⇥").replace("\n", "↵\n")
    return shown if text.strip() else shown.replace(" ", "·")


def _nearest(text: str, side: str) -> str:
    """The last or the first line or two of the text before or after a change."""
    if side == "before":
        shown = "\n".join(text[-_CONTEXT_CHARS:].split("\n")[-2:]).lstrip()
        return shown if shown == text else f"…{shown}"
    shown = "\n".join(text[:_CONTEXT_CHARS].split("\n")[:2])
    return shown if shown == text else f"{shown}…"
