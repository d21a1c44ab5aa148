"""Where the messages of a conversation lie in its rendered text.

Contents are looked for in order. The template's own text between two of them is cut where one message is closed and the
next is opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pic_traces.encode.encoded import Mark

_TEMPLATE_ROLE = "template"
# Shorter contents may well stand in the template's own text, so they are not looked for in all of it.
_SURE_LEN = 12
_NEAR = 200
_LINE_ENDS = re.compile(r"\n*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is known of a template's own text."""

    added: re.Pattern[str] | None
    """Finds added tokens; None where the tokenizer has none."""
    end_of_turn: str | None
    """The special token that closes an answer, where one does."""
    generation_prompt: str
    """What a conversation ends with when the model is to go on; empty where the template writes nothing then."""


class _Found(NamedTuple):
    number: int
    start: int
    end: int


def locate(text: str, contents: Sequence[str], roles: Sequence[str], shape: Shape) -> list[Mark]:
    """Where each message begins in `text`, and what in it belongs to none.

    Exact for templates that close every message with a token and show contents as they are (stripped or not);
    otherwise a message that is not found takes its share of the text between its neighbours.

    Args:
        contents: of the messages, in order.
        roles: what to call each of them.
    """
    prompt = shape.generation_prompt
    end = len(text) - len(prompt) if prompt and text.endswith(prompt) else len(text)
    begins: list[int] = []
    at = 0
    for found in _find_contents(text, end, contents, shape):
        num = found.number + 1 - len(begins)
        cuts = _closings(text, at, found.start, shape)[-num:]
        begins += _pad(cuts, num, _opening(text, at, found.start, shape) if begins else 0)
        at = found.end
    num = len(contents) - len(begins)
    cuts = _closings(text, at, end, shape)[:num]
    begins += _pad(cuts, num, _opening(text, at, end, shape) if begins else 0)
    marks = [Mark(begin, role) for begin, role in zip(begins, roles, strict=True)]
    lead = [Mark(0, _TEMPLATE_ROLE)] if not marks or marks[0].at > 0 else []
    tail = [Mark(end, _TEMPLATE_ROLE)] if end < len(text) else []
    return [*lead, *marks, *tail]


def _find_contents(text: str, end: int, contents: Sequence[str], shape: Shape) -> list[_Found]:
    """The messages whose content stands in the text, in order and disjoint."""
    result: list[_Found] = []
    at = 0
    for number, content in enumerate(map(str.strip, contents)):
        if len(content) >= _SURE_LEN:
            start = text.find(content, at, end)
        elif content and shape.end_of_turn is None:
            start = text.find(content, at, min(end, at + _NEAR))
        else:
            continue
        if start >= 0:
            at = start + len(content)
            result.append(_Found(number, start, at))
    return result


def _closings(text: str, start: int, end: int, shape: Shape) -> list[int]:
    """Where something is opened after something was closed, in template text `[start, end)`."""
    if shape.end_of_turn is None:
        return []
    cuts: list[int] = []
    at = text.find(shape.end_of_turn, start, end)
    while at >= 0:
        after = at + len(shape.end_of_turn)
        opened = shape.added.search(text, after, end) if shape.added is not None else None
        cuts.append(opened.start() if opened else min(end, _after_line_ends(text, after)))
        at = text.find(shape.end_of_turn, after, end)
    return cuts


def _opening(text: str, start: int, end: int, shape: Shape) -> int:
    """Where a message is opened in template text that closes none: its last added token, or a new line."""
    opened = list(shape.added.finditer(text, start, end)) if shape.added is not None else []
    return opened[-1].start() if opened else min(end, _after_line_ends(text, start))


def _after_line_ends(text: str, at: int) -> int:
    match = _LINE_ENDS.match(text, at)
    return match.end() if match else at


def _pad(cuts: list[int], num: int, fallback: int) -> list[int]:
    """`num` cuts in order: where there are fewer, the first ones fall together at `fallback`, at the latest."""
    first = min([fallback, *cuts[:1]])
    return [first] * (num - len(cuts)) + cuts
