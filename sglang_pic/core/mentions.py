"""Finds the parts of a prompt that are likely to depend on a changed field: those that name it.

Rows after a field depend on its value mostly where the value is named again, in the first tokens after the field, and
at the end of the prompt (Programmable KV, arXiv:2606.17107). If no text names the value, or a negation was inserted,
any later text may depend on it, and all of it is computed. The rule was found on one set of templates and tested on
others (bench/results/study/changed-fields.md).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple
from unicodedata import category

import numpy as np

from sglang_pic.core.alignment import Difference
from sglang_pic.core.conclusions import TOKENS_BEFORE, TOKENS_BEHIND, Named, find_conclusions
from sglang_pic.core.lexicon import WORD_TOKENS, Lexicon, without_spaces
from sglang_pic.core.spans import Span, merge_spans
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.value_forms import may_have_forms, other_forms, words_of, written_apart

# A field is identified by its rarest words; words with more than `_MOST_PLACES` occurrences are ignored. At most
# `_MOST_LOOKED_FOR` words, the rarest in any text, are looked for. A removed text may say more than a value: all its
# words are looked for, and the other limits are for every `_TOKENS_OF_VALUE` tokens (bench/results/study/context.md).
_MOST_WORDS = 4
_MOST_LOOKED_FOR = 12
_PLACES_OF_VALUE = 6
_TOKENS_OF_VALUE = 32
_FEW_WORDS = 2
_MOST_PLACES = 8
# Words to both sides of the value that are its label, and the tokens computed from each of them on.
_LABEL_LEFT, _LABEL_RIGHT = 6, 3
_LABEL_BEHIND = 3
# How far the field's line is read to both sides of the value.
_LINE_TOKENS = 24
_WORD_BEGINS = 2
# Tokens before a sign that may be signs of the same line or bar.
_BESIDE_SIGNS = 3
# Tokens beside a value that may be digits of the same number.
_NUMBER_TOKENS = 16
# Lines, bars and spinners that are drawn, and a mark at a sentence's end: they say nothing.
_DRAWN = re.compile(r"[-=]{2,}>?|[\u2500-\u259f\u2800-\u28ff]|!(?=\s|$)")
# A frequent word of the value counts if a word of the label is that near.
_NEAR_TOKENS = 24
# Words of a value whose words are all frequent name it where they follow each other, so near; in more places
# everything is computed.
_FOLLOWING_TOKENS = 4
_MOST_FOLLOWING = 64
# Of more other forms none is looked for.
_MOST_FORMS = 1 << 14
# With more changed fields the text is another record, where a value that no text names is one of many.
_FEW_FIELDS = 2
# English words that can negate or limit the rest of their clause.
_GRAMMAR = frozenset(
    re.findall(
        "[a-z]+",
        "a all already almost always an and any anybody are be been can cannot could did do does every everybody few "
        "had hardly has have is just less longer many may might more must neither never no nobody non none nor not "
        "nothing now often only or quite rarely seldom shall should some somebody still t the too very was were will "
        "with without won would yet",
    )
)
# They name nothing where a value has another word.
_JOINING = frozenset(re.findall("[a-z]+", "a an and as at by for from in of or the to with"))


class _Place(NamedTuple):
    """A changed field in the prompt."""

    value: dict[str, None]
    """The words of the new value."""
    label: list[str]
    """The words next to it on its line."""


class _Names(NamedTuple):
    """The words that name a field."""

    sides: tuple[list[str], list[str]]
    """Words of the old value only, and of the new value only, in order; all words of both if these are the same."""
    label: list[str]
    num_values: int
    """How many values the field may hold: one for every `_TOKENS_OF_VALUE` tokens of a removed text, else 1."""
    forms: dict[str, set[str]]
    """By word of the values: how else it is written."""


class Mentions(NamedTuple):
    """Where the prompt names one changed field, after the first field."""

    named_from: int
    """The first place that names a value; the prompt's end if there is none."""
    spans: list[Span]
    """Spans to compute, ascending."""


def find_mentions(fields: Sequence[Difference], tokens: Tokens, lexicon: Lexicon) -> list[Mentions] | None:
    """The mentions of each of `fields`, one or more; `None` if finding them would take too long."""
    places: dict[Span, _Place] = {}
    for field in fields:
        if field.new not in places:
            places[field.new] = _place(field.new, tokens, lexicon)
    names = [_names(field, places[field.new], tokens, lexicon) for field in fields]
    first = min(field.new[1] for field in fields)
    behind = tokens[first:]
    # A frequent word identifies a value only if the value has few words.
    short = {word: None for each in names for side in each.sides if len(side) <= _FEW_WORDS for word in side}
    rare = {word: None for each in names for side in (*each.sides, each.label) for word in side if word not in short}
    # A field's own words, which may begin a little before the difference, are no mention.
    own = merge_spans((start - first - _WORD_BEGINS, end - first) for start, end in places)
    places_of = lexicon.find(short, behind, rare=rare)
    if places_of is None:
        return None
    found = {word: _outside(at, own) for word, at in places_of.items()}
    frequent = {word: None for each in names for side in _frequent(each, found) for word in side}
    more = lexicon.find(frequent, behind)
    if more is None:
        return None
    found |= {word: _outside(at, own) for word, at in more.items()}
    formed = {word: _outside(at, own) for word, at in _find_forms(names, behind, lexicon).items()}
    # With its other forms a word may be too frequent: what it names by itself is computed all the same.
    ways = [found, found | {word: sorted({*found[word], *at}) for word, at in formed.items()}] if formed else [found]
    is_few = len(places) <= _FEW_FIELDS
    named = [
        _mentions(each, way, behind, lexicon, _may_follow_unnamed(field, each, found, tokens, lexicon, is_few=is_few))
        for field, each in zip(fields, names, strict=True)
        for way in ways
    ]
    concluded = find_conclusions(named, behind, lexicon)
    if concluded is None:
        return None
    spans = [[*each.spans, *more] for each, more in zip(named, concluded, strict=True)]
    return [
        Mentions(
            first + min(each.named_from for each in named[at : at + len(ways)]),
            [(first + start, first + end) for start, end in merge_spans(chain(*spans[at : at + len(ways)]))],
        )
        for at in range(0, len(named), len(ways))
    ]


def _find_forms(names: Sequence[_Names], tokens: Tokens, lexicon: Lexicon) -> dict[str, list[int]]:
    """By word of the values the places of its other forms; empty if there are too many to look for."""
    forms = {form: None for each in names for form in chain.from_iterable(each.forms.values())}
    if not 0 < len(forms) <= _MOST_FORMS:
        return {}
    pairs = [form.split() for form in forms if " " in form]
    found = lexicon.find(chain.from_iterable(pairs), tokens, rare=[form for form in forms if " " not in form])
    if found is None:
        return {}
    found |= {" ".join(pair): sorted(_following(pair, found)) for pair in pairs}
    formed = defaultdict[str, list[int]](list)
    for word, others in chain.from_iterable(each.forms.items() for each in names):
        formed[word] += chain.from_iterable(found[form] for form in others)
    return {word: sorted({*places}) for word, places in formed.items() if places}


def _mentions(
    names: _Names, found: dict[str, list[int]], tokens: Tokens, lexicon: Lexicon, is_said_otherwise: bool
) -> Named:
    label = sorted(place for word in _rarest(names.label, found, lexicon) for place in found[word])
    words = _identifying(names, found, lexicon)
    places = {place for word in words for place in found[word]}
    everywhere: list[int] = []
    for side in names.sides:
        if not any(word in words for word in side):
            near = {place for word in side for place in _near(found[word], label)}
            places.update(near)
            if not near and len(side) > _FEW_WORDS:
                near = _following(side, found)
                places.update(near if len(near) <= _MOST_FOLLOWING else ())
                everywhere += [min(near)] if len(near) > _MOST_FOLLOWING else []
            elif not near and not any(any(map(str.isdigit, word)) and not found[word] for word in side):
                # Any of the places may be meant; not of the unit of a number that is nowhere.
                saying = [word for word in side if word not in _JOINING] or side
                everywhere += [at for word in saying for at in found[word][:1]]
    if is_said_otherwise:
        everywhere = [0]
    spans = [(place, place + _LABEL_BEHIND) for place in label[:_MOST_PLACES]]
    # A token has a character at least.
    behind = TOKENS_BEHIND + max([0, *(len(word) - TOKENS_BEFORE for word in words)])
    spans += [(lexicon.line_start(tokens, place, TOKENS_BEFORE), place + behind) for place in places]
    if everywhere:
        spans.append((min(everywhere), len(tokens)))
    return Named(
        named_from=min([*places, *everywhere], default=len(tokens)),
        places=[] if everywhere else sorted(places),
        words={*names.label, *names.sides[0], *names.sides[1]},
        spans=merge_spans((start, min(end, len(tokens))) for start, end in spans),
    )


def _may_follow_unnamed(
    field: Difference,
    names: _Names,
    found: dict[str, list[int]],
    tokens: Tokens,
    lexicon: Lexicon,
    *,
    is_few: bool,
) -> bool:
    """Whether later text may depend on the value in other words: both values are a word or two that no text names, or
    differ in signs alone.

    True if they differ in a script without spaces, whose words are not known; else False for one of many fields, and if
    both values begin with a capital: little follows from another name.
    """
    texts = [lexicon.text(side) for side in (field.old, tokens[slice(*field.new)])]
    old, new = map(without_spaces, texts)
    if old != new or not is_few:
        return old != new
    words = [[word for word in side if word not in _GRAMMAR] for side in names.sides]
    if not any(words):
        before, after = lexicon.text(field.before[-_BESIDE_SIGNS:]), lexicon.text(tokens[field.new[1] :][:1])
        old_signs, new_signs = (_signs(f"{before}{text}{after}") for text in texts)
        # Of a sign of several tokens each is a replacement character.
        return any(names.sides) or old_signs != new_signs or any("\ufffd" in text for text in texts)
    if any(len(side) > _FEW_WORDS for side in words):
        return False
    if not all(word.isalpha() and not found[word] for side in words for word in side):
        return False
    return not all(text.lstrip()[:1].isupper() for text in texts)


def _signs(text: str) -> list[str]:
    """The signs of a text that say something: of mathematics, negations, pictures."""
    return [character for character in _DRAWN.sub("", text) if character in "-!" or category(character)[0] == "S"]


def _frequent(names: _Names, found: dict[str, list[int]]) -> Iterator[list[str]]:
    """The values of several words of which none has few places."""
    for side in names.sides:
        if len(side) > _FEW_WORDS and not any(0 < len(found[word]) <= _MOST_PLACES for word in side):
            yield side


def _following(words: list[str], found: dict[str, list[int]]) -> set[int]:
    """The places where two words of a value follow each other as in the value."""
    places = set[int]()
    for word, after in pairwise(words):
        here, there = found[word], found[after]
        if len(here) > len(there):
            for at in there:
                places.update(here[bisect_left(here, at - _FOLLOWING_TOKENS) : bisect_left(here, at)])
        else:
            places.update(at for at in here if bisect_right(there, at) < bisect_right(there, at + _FOLLOWING_TOKENS))
    return places


def _place(new: Span, tokens: Tokens, lexicon: Lexicon) -> _Place:
    start, end = new
    line_start, line_end = lexicon.line_start(tokens, start, _LINE_TOKENS), lexicon.line_end(tokens, end, _LINE_TOKENS)
    value = lexicon.words(tokens, start, end)
    left, right = lexicon.words(tokens, line_start, start), lexicon.words(tokens, end, line_end)
    nearest = [*list(left)[-_LABEL_LEFT:], *list(right)[:_LABEL_RIGHT]]
    return _Place(value, [word for word in dict.fromkeys(nearest) if word not in value])


def _names(field: Difference, place: _Place, tokens: Tokens, lexicon: Lexicon) -> _Names:
    start, end = field.new
    # Words may go on beyond the field, where both sides are equal.
    before = tokens[max(0, start - WORD_TOKENS) : start]
    if not np.array_equal(before[-len(field.before) :], field.before):
        before = field.before
    context = np.concatenate([before, field.old, tokens[end : end + WORD_TOKENS]])
    old, new = lexicon.words(context, len(before), len(before) + len(field.old)), place.value
    sides = [word for word in old if word not in new], [word for word in new if word not in old]
    first, second = sides if any(sides) else (list(old), list(new))
    label = [word for word in place.label if word not in old]
    num_values = 1
    if start == end:
        num_values += len(field.old) // _TOKENS_OF_VALUE
    else:
        first, second = _unusual(first, lexicon), _unusual(second, lexicon)
    forms = [
        _forms_of(words, left, value, tokens[end:], lexicon)
        for words, left, value in ((first, before, field.old), (second, tokens[:start], tokens[start:end]))
    ]
    # The date of a stamp of which only the time changed is no value.
    same = {*old, *chain.from_iterable(forms[0].values())} & {*new, *chain.from_iterable(forms[1].values())}
    return _Names(
        (first, second), label, num_values, {word: each - same for side in forms for word, each in side.items()}
    )


def _forms_of(
    words: Sequence[str], before: Tokens, value: Tokens, behind: Tokens, lexicon: Lexicon
) -> dict[str, set[str]]:
    """How else the words of a value are written, or what is written with them."""
    forms = {word: other_forms(word) for word in words if may_have_forms(word)}
    if forms:
        texts = [lexicon.text(each) for each in (before[-_NUMBER_TOKENS:], value, behind[:_NUMBER_TOKENS])]
        for text in written_apart("".join(texts), len(texts[0]), len(texts[0] + texts[1])):
            for word in forms.keys() & words_of(text):
                forms[word] |= other_forms(text)
    return forms


def _unusual(words: list[str], lexicon: Lexicon) -> list[str]:
    kept = sorted(words, key=lexicon.rank, reverse=True)[:_MOST_LOOKED_FOR]
    return [word for word in words if word in kept]


def _identifying(names: _Names, found: dict[str, list[int]], lexicon: Lexicon) -> list[str]:
    """The rarest word of each value, and further ones while all of them together have few places."""
    num = names.num_values
    ranked = [_rarest(side, found, lexicon, num) for side in names.sides]
    chosen = list(dict.fromkeys(word for side in ranked for word in side[:1]))
    num_places = sum(len(found[word]) for word in chosen)
    for word in _rarest([word for side in ranked for word in side], found, lexicon, num):
        if word not in chosen and num_places + len(found[word]) <= num * _PLACES_OF_VALUE:
            chosen.append(word)
            num_places += len(found[word])
    return chosen


def _rarest(words: Sequence[str], found: dict[str, list[int]], lexicon: Lexicon, num_values: int = 1) -> list[str]:
    """The words with the fewest places, and among equals those that are rarest in any text."""
    few = [word for word in dict.fromkeys(words) if 0 < len(found[word]) <= _MOST_PLACES]
    return sorted(few, key=lambda word: (len(found[word]), -lexicon.rank(word)))[: num_values * _MOST_WORDS]


def _outside(places: list[int], spans: list[Span]) -> list[int]:
    """The ascending places in none of a few spans."""
    for start, end in spans:
        first = bisect_left(places, start)
        if places[first : first + 1] and places[first] < end:
            places = places[:first] + places[bisect_left(places, end, first) :]
    return places


def _near(places: list[int], others: list[int]) -> Iterator[int]:
    """The ascending `places` that are near one of `others`."""
    for other in others:
        yield from places[bisect_left(places, other - _NEAR_TOKENS) : bisect_right(places, other + _NEAR_TOKENS)]
