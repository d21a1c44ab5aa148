"""Finds lines that follow from a changed field in two steps: they name a word of a line that names the field's value.

    The pipe is made of [copper].
    Things made of copper are stored in the Hall.     names the value; Hall is the rarest word of this line
    The key of the Hall is with Ruth.                 names Hall, and is computed too

A third step is not looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.spans import Span, holds
from sglang_pic.core.tokens import Tokens

# The second step is skipped for a value that is named in more places.
_MOST_PLACES = 6
# Tokens of a line before and after a word that names a value.
TOKENS_BEFORE, TOKENS_BEHIND = 16, 24
# Tokens computed after a word of the second step.
_COMPUTED_BEHIND = 8
# More frequent words are no second step: by their rank in any text, and by their places in this one.
_FREQUENT_RANK = 1000
_FEW_PLACES = 3
# Words with more places are ignored before their places are compared with the field's spans.
_TOO_MANY_PLACES = 4096


class Named(NamedTuple):
    """Where a prompt names a changed field."""

    named_from: int
    """The first place that names a value; the prompt's end if there is none."""
    places: list[int]
    """Positions of the value's words, ascending; empty if everything after one of them is computed."""
    words: set[str]
    """The words of the field's values and its label."""
    spans: list[Span]
    """Spans that are computed because of the field, ascending."""


def find_conclusions(fields: Sequence[Named], tokens: Tokens, lexicon: Lexicon) -> list[list[Span]] | None:
    """Further spans to compute for each field; `None` if finding them would take too long. Cost as `Lexicon.find`.

    Each line that names a value contributes its rarest word that no other of these lines has.
    """
    lines = [_words_beside(field, tokens, lexicon) for field in fields]
    asked = {word: None for each in lines for line in each for word in line}
    found = lexicon.find((), tokens, rare=asked) if asked else {}
    if found is None:
        return None
    return [
        [span for line in each for span in _spans_of(line, field, found, tokens, lexicon)]
        for field, each in zip(fields, lines, strict=True)
    ]


def _words_beside(field: Named, tokens: Tokens, lexicon: Lexicon) -> list[list[str]]:
    """For each line that names a value, the words that no other of these lines has."""
    if len(field.places) > _MOST_PLACES:
        return []
    lines: dict[int, list[str]] = {}
    for place in field.places:
        end = lexicon.line_end(tokens, place, TOKENS_BEHIND)
        words = lexicon.words(tokens, lexicon.line_start(tokens, place, TOKENS_BEFORE), end)
        lines[end] = [word for word in words if word not in field.words and lexicon.rank(word) > _FREQUENT_RANK]
    times = Counter(word for line in lines.values() for word in line)
    return [[word for word in line if times[word] == 1] for line in lines.values()]


def _spans_of(
    line: list[str], field: Named, found: dict[str, list[int]], tokens: Tokens, lexicon: Lexicon
) -> list[Span]:
    """Spans to compute around the other places of a line's rarest word; empty if these are too many."""
    elsewhere = {
        word: [place for place in found[word] if not holds(field.spans, place)]
        for word in line
        if len(found[word]) <= _TOO_MANY_PLACES
    }
    few = [word for word, places in elsewhere.items() if 0 < len(places) <= _FEW_PLACES]
    if not few:
        return []
    rarest = min(few, key=lambda word: (len(elsewhere[word]), -lexicon.rank(word)))
    return [
        (
            lexicon.line_start(tokens, place, TOKENS_BEFORE),
            min(lexicon.line_end(tokens, place, _COMPUTED_BEHIND) + 1, len(tokens)),
        )
        for place in elsewhere[rarest]
    ]
