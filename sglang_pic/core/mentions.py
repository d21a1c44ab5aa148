"""What of a prompt is likely to have drawn on a changed field: the lines that name it, and the prompt's end.

While a prompt is prefilled, the model writes what follows from a field into the rows behind it: mostly into the lines
that name the field's value, the first tokens behind the field, and the prompt's end (Programmable KV, arXiv:2606.17107;
measured for this rule in bench/results/STUDY.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sglang_pic.core.alignment import Difference
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.spans import Span, merge_spans
from sglang_pic.core.tokens import Tokens

# Computed before and behind a word that names the field, and to the end of its line if that is near.
_TOKENS_BEFORE = 8
_TOKENS_BEHIND = 24
_LINE_TOKENS = 48
# A word of the value that stands in more places says little by itself: it counts where the field's label is near.
_MOST_PLACES = 8
# Of a long value, which shares many words with any text, a word must be rarer than that.
_LONG_VALUE_WORDS = 8
_MOST_PLACES_OF_LONG = 3
_NEAR_TOKENS = 24
# Words of a label: those directly in front of the value, on its line.
_LABEL_WORDS = 2
_LABEL_TOKENS = 16
# English words that any text has. They name a field only where its value has no other word.
_COMMON_TEXT = """
a an and are as at be been but by can could did do does for from had has have he her his how i if in into is it its me
my of on or our she so than that the their them then there these they this those to us was we were what when where which
who will with would you your
"""
_COMMON = frozenset(_COMMON_TEXT.split())


class _Names(NamedTuple):
    """The words that name a field."""

    values: list[str]
    """In the old value only, or in the new one only."""
    label: list[str]
    """In front of the value, in order."""


def find_mentions(fields: Sequence[Difference], tokens: Tokens, end: int, lexicon: Lexicon) -> list[Span]:
    """Spans of `tokens[:end]` behind the first field, around what names a field's old or new value; ascending."""
    names = [_names(field, tokens, lexicon) for field in fields]
    first = min((field.new[1] for field in fields), default=end)
    behind = tokens[first:end]
    found = lexicon.find({word for each in names for word in (*each.values, *each.label)}, behind)
    places = {place for each in names for place in _places(each, found)}
    return _around(sorted(places), behind, first, lexicon)


def _names(field: Difference, tokens: Tokens, lexicon: Lexicon) -> _Names:
    start, end = field.new
    flank = len(field.before)
    context = np.concatenate([field.before, field.old, tokens[end : end + flank]])
    old = lexicon.words(context, flank, flank + len(field.old))
    new = lexicon.words(tokens, start, end)
    values: list[str] = []
    for words, others in ((old, new), (new, old)):
        differing = [word for word in words if word not in others] or list(words)
        values += [word for word in differing if word not in _COMMON] or differing
    line = tokens[max(0, start - _LABEL_TOKENS) : start]
    breaks = np.flatnonzero(lexicon.breaks(line))
    line_start = start - len(line) + (int(breaks[-1]) + 1 if len(breaks) else 0)
    before = lexicon.words(tokens, line_start, start)
    label = [word for word in before if word not in _COMMON and word not in new]
    return _Names(list(dict.fromkeys(values)), label[-_LABEL_WORDS:])


def _places(names: _Names, found: dict[str, list[int]]) -> Iterator[int]:
    """Where one field is named."""
    labelled = _label_places(names.label, found)
    is_long = len(names.values) > _LONG_VALUE_WORDS
    for word in names.values:
        places = found[word]
        if len(places) <= (_MOST_PLACES_OF_LONG if is_long else _MOST_PLACES):
            yield from places
        elif not is_long:
            yield from (place for place in places if _is_near(place, labelled))
    if len(labelled) <= _MOST_PLACES:
        yield from labelled


def _label_places(label: list[str], found: dict[str, list[int]]) -> list[int]:
    """Where the words of a label stand together."""
    if not label:
        return []
    places = found[label[-1]]
    for word in label[:-1]:
        places = [place for place in places if _is_near(place, found[word], _LABEL_WORDS + 2)]
    return places


def _is_near(place: int, others: list[int], most: int = _NEAR_TOKENS) -> bool:
    """Whether one of the ascending `others` is at most `most` tokens away."""
    i = bisect_left(others, place - most)
    return i < len(others) and others[i] <= place + most


def _around(places: list[int], tokens: Tokens, offset: int, lexicon: Lexicon) -> list[Span]:
    """What is computed around the places, as spans of the prompt."""
    spans = []
    for place in places:
        after = np.flatnonzero(lexicon.breaks(tokens[place : place + _LINE_TOKENS]))
        end = place + max(_TOKENS_BEHIND, int(after[0]) + 1 if len(after) else 0)
        spans.append((offset + max(0, place - _TOKENS_BEFORE), offset + min(end, len(tokens))))
    return merge_spans(spans)
