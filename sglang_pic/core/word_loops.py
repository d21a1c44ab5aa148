"""The inner loops of the search for words, compiled by `native.py`.

Texts are concatenated in arrays of characters and of their kinds. NOTE: what a loop calls or reads is defined in its
own file, because numba's cache is renewed when that file changes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_pic.core.native import loop

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]

ALNUM, DECIMAL, DIGIT, JOINT, IN_NUMBER, ESCAPE, ESCAPED = 1, 2, 4, 8, 16, 32, 64
"""Kinds of a character, added up; a joint may join words to one word, and `IN_NUMBER` digits to one number;
`ESCAPED` after `ESCAPE` is a line break or a tab in JSON."""
WHOLE: Final = -1
"""Instead of a position: the token is the whole word."""

SIGNED, STARTS, ENDS, OPEN, CLOSED = 1, 2, 4, 8, 16
"""Marks of a token, added up: it has signs before its word; it starts, ends with a letter or digit; it has text
that starts, ends with no space."""

# Numbers of pairs of a token and the character after it; few pairs share one.
_PAIRS = 1 << 16
# A word whose tokens have more places is frequent.
_FREQUENT = 32
# Ways to begin a word at all places of a text, in tries: each costs a few nanoseconds.
_WAYS_PER_TRY = 16
# Digits of a number that is a word of its own, too, inside a joined word: the 8080 of 10.0.0.5:8080. Fewer are parts of
# dates and times.
_DIGITS = 3


class Book(NamedTuple):
    """Arrays by token of a vocabulary of `n` tokens; token `n` has no text.

    The text of a token begins at its entry of `..._at`, `[n + 2]`, and ends at the next one.
    """

    kinds: Bytes
    """The kinds of the texts' characters."""
    kinds_at: Ints
    folded: Ints
    """The characters of the folded texts."""
    folded_kinds: Bytes
    folded_at: Ints
    bare_len: Ints
    """`[n + 1]`: length of the folded text without its leading signs."""
    signs_len: Ints
    """`[n + 1]`: length of the leading signs."""
    first: Ints
    """`[n + 1]`: the first character of the folded text; 0 if there is none."""
    marks: Bytes
    """`[n + 1]`"""


class Asked(NamedTuple):
    """The words to look for, and the ways to write each: its first token, and where that token's text ends in the word.

    A word begins at its entry of `at`, `[num_words + 1]`, and ends at the next one.
    """

    words: Ints
    at: Ints
    is_rare: Bytes
    """`[num_words]`: whether the word is ignored if it is frequent."""
    first: Bytes
    """`[num_words]`: the kinds of its first character."""
    last: Bytes
    way_words: Ints
    """`[num_ways]`: the number of the word."""
    way_tokens: Ints
    way_rests: Ints
    """`[num_ways]`: where the token's text ends in the word; or `WHOLE`."""


# NOTE: what is called for every token of a prompt gets numbers: numba counts a reference to each array of a call.


@loop()
def _known(token: int, num_known: int) -> int:
    """The token; `num_known`, which has no text, if it is unknown."""
    return token if 0 <= token < num_known else num_known


@loop()
def _token(tokens: Ints, place: int, num_known: int) -> int:
    """The token at a place; `num_known` if it is unknown, or the place beyond the ends."""
    return _known(int(tokens[place]), num_known) if 0 <= place < len(tokens) else num_known


@loop()
def _are_joined(tokens: Ints, place: int, marks: Bytes) -> bool:
    """Whether the tokens on both sides of a place have text with no space between."""
    known = len(marks) - 1
    return marks[_token(tokens, place - 1, known)] & CLOSED != 0 and marks[_token(tokens, place, known)] & OPEN != 0


@loop("tiibi")
def nearest_break(tokens: Ints, start: int, end: int, breaks: Bytes, is_last: int) -> int:
    """The last or the first token of `[start, end)` with a line break; -1 if there is none."""
    known = len(breaks) - 1
    for step in range(end - start):
        place = end - 1 - step if is_last else start + step
        if breaks[max(0, min(tokens[place], known))]:
            return place
    return -1


@loop()
def _split(kinds: Bytes, low: int, high: int) -> Ints:
    """The words of a text that overlap `[low, high)`, from the kinds of its characters and two zeros."""
    spans, count, at, total = np.empty(4 * len(kinds), np.int32), 0, 0, len(kinds) - 2
    while at < total:
        start = at
        while kinds[at] & ALNUM or (at > start and kinds[at] & JOINT and kinds[at + 1] & ALNUM):
            at += 1
        if at > start and start < high and at > low:
            spans[count], spans[count + 1] = start, at
            count += 2
        here = start
        while here < at:
            begin, is_number = here, kinds[here] & DECIMAL
            while here < at and kinds[here] & ALNUM and kinds[here] & DECIMAL == is_number:
                here += 1
            is_word = here > begin and (not is_number or _DIGITS <= here - begin < at - start)
            if is_word and begin < high and here > low:
                spans[count], spans[count + 1] = begin, here
                count += 2
            here += here == begin
        at += at == start
    return spans[:count]


@loop("tiitbbi")
def word_spans(
    tokens: Ints, start: int, end: int, folded_at: Ints, folded_kinds: Bytes, marks: Bytes, most: int
) -> tuple[int, int, Ints]:
    """The words that overlap `[start, end)`: letters and digits, joined by single joints.

    Returns:
        The span of their tokens, at most `most` beyond the given one; and the start and end of each word in the folded
        text of these tokens, followed by the runs of letters and the longer runs of digits in it.
    """
    first, last, known = start, end, len(marks) - 1
    while first > 0 and start - first < most and _are_joined(tokens, first, marks):
        first -= 1
    while last < len(tokens) and last - end < most and _are_joined(tokens, last, marks):
        last += 1
    total = low = high = 0
    for place in range(first, last):
        token = _token(tokens, place, known)
        low = total if place == start else low
        total += folded_at[token + 1] - folded_at[token]
        high = total if place == end - 1 else high
    kinds = np.zeros(total + 2, np.uint8)
    at = 0
    for place in range(first, last):
        token = _token(tokens, place, known)
        for i in range(folded_at[token], folded_at[token + 1]):
            kinds[at] = folded_kinds[i]
            at += 1
    return first, last, _split(kinds, low, high)


@loop()
def _goes_on(following: int, over_next: int, edge: int) -> bool:
    """Whether these characters continue a word with `edge` as its outermost one, as in 1.500 and 500.5 for 500."""
    if following & ALNUM:
        return True
    return bool(edge & DIGIT and following & IN_NUMBER and over_next & DIGIT)


@loop()
def _ends_there(tokens: Ints, place: int, word: int, asked: Asked, book: Book) -> bool:
    """Whether the text from the token at `place` on begins with the word, which ends there."""
    points, folded, kinds, folded_at, marks = asked.words, book.folded, book.folded_kinds, book.folded_at, book.marks
    base, word_len, length, following, over_next = asked.at[word], asked.at[word + 1] - asked.at[word], 0, 0, 0
    token, known, at = tokens[place], len(marks) - 1, place
    start, stop = folded_at[token + 1] - book.bare_len[token], folded_at[token + 1]
    while True:
        for i in range(start, stop):
            if length < word_len and folded[i] != points[base + length]:
                return False
            if length == word_len:
                following = int(kinds[i])
            if length == word_len + 1:
                over_next = int(kinds[i])
            length += 1
        at += 1
        token = _known(tokens[at], known) if at < len(tokens) else known
        if length > word_len + 1 or not marks[token] & OPEN:
            break
        start, stop = folded_at[token], folded_at[token + 1]
    if word_len > 1 and int(asked.last[word]) & DIGIT and following & ALNUM and not following & DIGIT:
        # A unit or a particle: 30s, 16GB, 45개.
        return length >= word_len
    return length >= word_len and not _goes_on(following, over_next, int(asked.last[word]))


@loop()
def _begins_there(tokens: Ints, place: int, word: int, asked: Asked, book: Book) -> bool:
    """Whether the word does not begin before the signs of the token at `place`."""
    all_kinds, kinds_at, known = book.kinds, book.kinds_at, len(book.marks) - 1
    before = before_that = count = 0
    for at in range(place, max(-1, place - 3), -1):
        token = _known(tokens[at], known)
        start = kinds_at[token]
        stop = start + book.signs_len[token] if at == place else kinds_at[token + 1]
        while stop > start and count < 2:
            stop -= 1
            before, before_that = (before, int(all_kinds[stop])) if count else (int(all_kinds[stop]), 0)
            count += 1
    if before & ESCAPED and before_that & ESCAPE:
        # The n of a line break in JSON.
        return True
    return not _goes_on(before, before_that, int(asked.first[word]))


@loop()
def _are_equal(left: Ints, left_at: int, right: Ints, right_at: int, num: int) -> bool:
    at = 0
    while at < num and left[left_at + at] == right[right_at + at]:
        at += 1
    return at >= num


@loop()
def _pair(token: int, character: int) -> int:
    return (token * 31 + character) & (_PAIRS - 1)


@loop()
def _chain(heads: Ints, words: Ints, tokens: Ints, is_kept: Bools) -> Ints:
    """Link the ways with the same token: `heads` gets 1 + the last way; returns 1 + the way before each."""
    before = np.zeros(len(words), np.int32)
    for way in range(len(words)):
        if is_kept[words[way]]:
            before[way] = heads[tokens[way]]
            heads[tokens[way]] = way + 1
    return before


@loop()
def _places(tokens: Ints, heads: Ints) -> Ints:
    """The places of tokens that may begin a word."""
    places, count = np.empty(len(tokens) + 1, np.int32), 0
    for at in range(len(tokens)):
        places[count] = at
        count += 0 <= tokens[at] < len(heads) and heads[tokens[at]] != 0
    return places[:count]


@loop()
def _times(
    places: Ints, tokens: Ints, heads: Ints, before: Ints, words: Ints, is_all: Bools, num_words: int, most: int
) -> tuple[Ints, int]:
    """For each word the tokens that are the whole word; and the number of ways at all places, counted up to `most`."""
    times, num_ways = np.zeros(num_words, np.int32), 0
    for place in places:
        if num_ways > most:
            break
        way = heads[tokens[place]] - 1
        while way >= 0:
            num_ways += 1
            times[words[way]] += is_all[way]
            way = before[way] - 1
    return times, num_ways


@loop()
def _following(asked: Asked, is_all: Bools, is_kept: Bools) -> Bools:
    """By `_pair`: whether a word that begins with the token continues with the character."""
    following = np.zeros(_PAIRS, np.bool_)
    for way in range(len(is_all)):
        word = asked.way_words[way]
        if is_kept[word] and not is_all[way]:
            following[_pair(asked.way_tokens[way], asked.words[asked.at[word] + asked.way_rests[way]])] = True
    return following


@loop()
def _by_word(words: Ints, places: Ints, num_words: int) -> tuple[Ints, Ints]:
    """Places sorted by word, ascending, and the end of each word's places among them."""
    ends = np.zeros(num_words, np.int32)
    for word in words:
        ends[word] += 1
    ends = np.cumsum(ends).astype(np.int32)
    at, found = np.empty(num_words, np.int32), np.empty(len(places), np.int32)
    for word in range(num_words):
        at[word] = ends[word - 1] if word else 0
    for i in range(len(words)):
        found[at[words[i]]] = places[i]
        at[words[i]] += 1
    return found, ends


@loop()
def _search(
    places: Ints,
    tokens: Ints,
    heads: Ints,
    before: Ints,
    is_all: Bools,
    following: Bools,
    found: tuple[Ints, Ints],
    asked: Asked,
    book: Book,
    most_tries: int,
) -> tuple[int, int]:
    """Write the words found and their places to `found`, by place; returns their number, and that of tries."""
    found_words, found_places = found
    words, rests, points, at = asked.way_words, asked.way_rests, asked.words, asked.at
    marks, first, num_known = book.marks, book.first, len(heads)
    folded, folded_at = book.folded, book.folded_at
    count = tries = 0
    for place in places:
        token = tokens[place]
        before_it = _known(tokens[place - 1], num_known) if place else num_known
        behind_it = _known(tokens[place + 1], num_known) if place + 1 < len(tokens) else num_known
        is_edge = marks[token] & SIGNED or not marks[before_it] & ENDS
        # Words may begin here and go on, unless the next token says otherwise.
        may_go_on, num_begun = following[_pair(token, first[behind_it])], 0
        way = heads[token] - 1
        while way >= 0:
            if rests[way] != WHOLE:
                num_begun += 1
                may_go_on |= is_all[way]
            elif is_edge and not marks[behind_it] & STARTS:
                found_words[count], found_places[count] = words[way], place
                count += 1
            way = before[way] - 1
        if not num_begun or not may_go_on:
            continue
        tries += num_begun
        if tries > most_tries:
            break
        way = heads[token] - 1
        while way >= 0:
            word, rest = words[way], at[words[way]] + rests[way]
            num_more = min(at[word + 1] - rest, folded_at[behind_it + 1] - folded_at[behind_it])
            if (
                rests[way] != WHOLE
                and _are_equal(points, rest, folded, folded_at[behind_it], num_more)
                and _ends_there(tokens, place, word, asked, book)
                and _begins_there(tokens, place, word, asked, book)
            ):
                found_words[count], found_places[count] = word, place
                count += 1
            way = before[way] - 1
    return count, tries


@loop("twABi")
def find_words(
    tokens: Ints, heads: Ints, asked_arrays: tuple[Any, ...], book_arrays: tuple[Any, ...], most_tries: int
) -> tuple[Ints, Ints, int]:
    """Find words in tokens.

    Args:
        tokens: the text.
        heads: a zero for each token of the vocabulary; zeros again at the end.
        asked_arrays: an `Asked` as a plain tuple, which numba takes several times faster.
        book_arrays: a `Book` as a plain tuple.
        most_tries: the search ends after more tries, and does not begin if many more may be needed.

    Returns:
        The places of the words' first tokens, ascending for each word; the end of each word's places; and the tries.
    """
    asked, book = Asked(*asked_arrays), Book(*book_arrays)
    words, rests, by_token = asked.way_words, asked.way_rests, asked.way_tokens
    is_all = (rests == WHOLE) | (rests == (asked.at[1:] - asked.at[:-1])[words])
    before = _chain(heads, words, by_token, np.ones(len(asked.is_rare), np.bool_))
    places = _places(tokens, heads)
    most_ways = _WAYS_PER_TRY * most_tries
    times, num_ways = _times(places, tokens, heads, before, words, is_all, len(asked.is_rare), most_ways)
    heads[by_token] = 0
    if num_ways > most_ways:
        return np.zeros(0, np.int32), np.zeros(len(asked.is_rare), np.int32), most_tries + 1
    # A rare word that is frequent here is not looked for.
    is_kept = (times <= _FREQUENT) | (asked.is_rare == 0)
    before = _chain(heads, words, by_token, is_kept)
    following = _following(asked, is_all, is_kept)
    found = np.empty(num_ways, np.int32), np.empty(num_ways, np.int32)
    count, tries = _search(places, tokens, heads, before, is_all, following, found, asked, book, most_tries)
    heads[by_token] = 0
    found_words, found_places = found
    sorted_places, ends = _by_word(found_words[:count], found_places[:count], len(asked.is_rare))
    return sorted_places, ends, tries
