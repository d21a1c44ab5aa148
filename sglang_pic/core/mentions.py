"""What of a prompt is likely to have drawn on a changed field: the lines that name it, and the prompt's end.

While a prompt is prefilled, the model writes what follows from a field into the rows behind it: mostly into the lines
that name the field's value, the first tokens behind the field, and the prompt's end (Programmable KV, arXiv:2606.17107;
measured for this rule in bench/results/STUDY.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_pic.core.alignment import Difference
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.spans import Span, merge_spans
from sglang_pic.core.tokens import Tokens

# Computed before and behind a word that names the field, and to the end of its line if that is near.
_TOKENS_BEFORE = 8
_TOKENS_BEHIND = 24
_LINE_TOKENS = 48


def find_mentions(fields: Iterable[Difference], tokens: Tokens, end: int, lexicon: Lexicon) -> list[Span]:
    """Spans of `tokens[:end]` behind the first field, around what names a field's old or new value; ascending."""
    words: dict[str, None] = {}
    first = end
    for field in fields:
        first = min(first, field.new[1])
        words |= _value_words(field, tokens, lexicon)
    behind = tokens[first:end]
    places = [place for found in lexicon.find(list(words), behind).values() for place in found]
    return _around(sorted(set(places)), behind, first, lexicon)


def _value_words(field: Difference, tokens: Tokens, lexicon: Lexicon) -> dict[str, None]:
    """The words in which the old and the new value differ."""
    start, end = field.new
    flank = len(field.before)
    after = tokens[end : end + flank]
    old = lexicon.words(np.concatenate([field.before, field.old, after]), flank, flank + len(field.old))
    new = lexicon.words(tokens[max(0, start - flank) : end + flank], min(flank, start), min(flank, start) + end - start)
    differing = {word: None for word in (*old, *new) if (word in old) != (word in new)}
    return differing or old | new


def _around(places: list[int], tokens: Tokens, offset: int, lexicon: Lexicon) -> list[Span]:
    """What is computed around the places, as spans of the prompt."""
    spans = []
    for place in places:
        after = np.flatnonzero(lexicon.breaks(tokens[place : place + _LINE_TOKENS]))
        end = place + max(_TOKENS_BEHIND, int(after[0]) + 1 if len(after) else 0)
        spans.append((offset + max(0, place - _TOKENS_BEFORE), offset + min(end, len(tokens))))
    return merge_spans(spans)
