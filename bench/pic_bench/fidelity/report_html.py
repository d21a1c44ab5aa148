"""Owns report.html of a fidelity run: which parts stand on the page, and in which order.

It must not fetch anything, run scripts, or compute figures.
"""

from __future__ import annotations

import re
from html import escape

from pic_bench.fidelity.report_markdown import worst_words
from pic_bench.fidelity.sections import Part, Titled, claims_by_question, parts, verdict
from pic_bench.fidelity.summary import Claim, Summary, Verdict, Worst
from pic_bench.fidelity.words import DEFINITIONS, facts, limits_of
from pic_bench.report import page_parts

__all__ = ["html_report"]

_TAGS = {Verdict.YES: "tag yes", Verdict.NO: "tag no", Verdict.OPEN: "tag"}
# A figure and its bounds stay on one line.
_KEPT = r'<span class="keep">\g<0></span>'
_INTERVAL = re.compile(r"\S+ \[[^\]]+\]")
_CODE = re.compile("`([^`]+)`")


def html_report(summary: Summary) -> str:
    """The whole page."""
    title = f"Fidelity of {summary.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{summary.probes:,} records; every figure compares with the full prefill of the same tokens '
        "on the same server.</p>",
        "<h2>What this says</h2>",
        '<div class="claims">',
        *(_question(question, claims) for question, claims in claims_by_question(summary)),
        "</div>",
        "" if summary.claims else "<p>No question can be asked of these records.</p>",
        *(_part(part) for part in parts(summary)),
        *(["<h2>Prompts that moved furthest</h2>", *map(_worst, summary.worst)] if summary.worst else []),
        "<h2>Limits</h2>",
        page_parts.bullets(limits_of(summary)),
        "<h2>Words</h2>",
        page_parts.definitions(DEFINITIONS),
        "<h2>How it was measured</h2>",
        page_parts.definitions(facts(summary)),
    ]
    return page_parts.document(title, "".join(body))


def _question(question: str, claims: list[Claim]) -> str:
    lines = [
        f'<li><span class="{_TAGS[claim.verdict]}">{verdict(claim)}</span> <b>{escape(claim.where)}.</b> '
        f"{_sentence(claim.text)}</li>"
        for claim in claims
    ]
    return f'<div class="claim"><h3>{escape(question)}</h3><ul>{"".join(lines)}</ul></div>'


def _sentence(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", _INTERVAL.sub(_KEPT, escape(text)))


def _part(part: Part) -> str:
    figures = [(p.title, p.note, p.drawing.inline()) for p in part.pictures]
    notes = "".join(f'<p class="muted">{_sentence(note)}</p>' for note in part.notes)
    drawn = page_parts.figures(figures) if figures else ""
    return f"<h2>{escape(part.title)}</h2>{notes}{drawn}{''.join(map(_titled, part.tables))}"


def _titled(titled: Titled) -> str:
    shown = page_parts.table(titled.table)
    if titled.folded:
        return f"<details><summary><b>{escape(titled.title)}</b></summary>{shown}</details>"
    return f'<h3 class="over">{escape(titled.title)}</h3>{shown}' if titled.title else shown


def _worst(worst: Worst) -> str:
    place, *said = worst_words(worst)
    top = f"<b>{escape(place)}</b>{''.join(f'<span>{escape(words)}</span>' for words in said)}"
    text = f"<pre>{escape(worst.text)}</pre>" if worst.text else "<p>No text was recorded.</p>"
    return f'<details><summary>{top}</summary><div class="text">{text}</div></details>'
