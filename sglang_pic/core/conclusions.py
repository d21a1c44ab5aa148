"""The second step of a chain: what names a word that stands beside a changed field's value.

    The pipe is made of [copper].
    Things made of copper are stored in the Hall.     names the value; of its words, Hall is the rare one
    The key of the Hall is with Ruth.                 names that word, and is computed too

Nothing goes on from there: a third step is not looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.spans import Span, holds
from sglang_pic.core.tokens import Tokens

# A value that is named in more places is followed no further.
_MOST_PLACES = 6
# Beside a word that names a value: what stands before it on its line, and what the line says of it.
TOKENS_BEFORE, TOKENS_BEHIND = 16, 24
# Behind the word that is concluded there less is computed.
_COMPUTED_BEHIND = 8
# Words that are as frequent as this in any text are concluded nowhere, nor are words that stand in more places.
_FREQUENT_RANK = 1000
_FEW_PLACES = 3
# More places than a field's own spans hold, and these.
_TOO_MANY_PLACES = 4096


class Named(NamedTuple):
    """Where a changed field is named."""

    named_from: int
    """The first place that names a value; the end where nothing does."""
    places: list[int]
    """Of the value's words, ascending; none where everything behind one is computed."""
    words: set[str]
    """What names the field: words of its values and its label."""
    spans: list[Span]
    """What is computed because of it, ascending."""


def find_conclusions(fields: Sequence[Named], tokens: Tokens, lexicon: Lexicon) -> list[list[Span]] | None:
    """For each field what has to be computed beside its own spans; `None` where that would take too long to tell.

    Of each line that names a value the rarest word counts that no other of these lines has; cost as `Lexicon.find`.
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
    """The words that stand on one of the lines that name a value only, line by line."""
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
    """What is computed around the rarest word of a line, where that stands elsewhere in a few places."""
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
