"""What the text of each token is: lets the guard of changed fields find words and lines in token ids.

Words are compared without regard to case or to the spaces and signs in front of them, so that `" Alpha"`, `alpha` and
`"alpha` are one word, in whatever tokens it is written.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_pic.core.native import compiled
from sglang_pic.core.tokens import Tokens

_T = TypeVar("_T", bound=np.generic)
_V = TypeVar("_V")

_SIGNS = re.compile(r"[\W_]+")
_LETTERS = re.compile(r"[^\W\d_]+")
# Several words that single signs join: 18:27, 2026-01-05, 3.5, job_12, main.py.
_JOINED = re.compile(r"[^\W_]+(?:[-_.:/@'+,][^\W_]+)*")
_NUMBER_SIGNS = tuple(".,:-/")
# In the text of a token that is a part of a character.
_NO_TEXT = "\ufffd"
# Tokens of one word at most; longer ones are cut.
_WORD_TOKENS = 24
MESSAGE_BREAK = "\x1e\n"
"""The text to give to a token that opens or closes a message."""

# A token and the character behind it have one of so many numbers; few pairs share one.
_PAIRS = 1 << 16
# A word whose tokens stand in more places is frequent.
_FREQUENT = 32
# Places where a word of several tokens may begin, times such words, that are looked at; for each token of a text too.
# The plans of recorded sessions look at up to 251.
_MOST_TRIES = 1 << 15
_TRIES_PER_TOKEN = 1
# In the place of a position: the token is the whole word.
_WHOLE = -1
_MOST_REMEMBERED = 1 << 16


class Book(NamedTuple):
    """What is known of each token of a vocabulary; the arrays have one more entry, for a token without text."""

    texts: list[str]
    bare: list[str]
    """Without the signs in front, folded."""
    folded: list[str]
    signed: npt.NDArray[np.bool_]
    """Whether signs stand in front."""
    starts: npt.NDArray[np.bool_]
    """Whether it begins inside a word."""
    ends: npt.NDArray[np.bool_]
    first: npt.NDArray[np.int64]
    """The first character, folded."""


class Lexicon:
    """The texts of a vocabulary.

    Args:
        texts: by token id, with the spaces that belong to a token; `MESSAGE_BREAK` for one that opens or closes a
            message.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        none = np.zeros(1, dtype=np.bool_)
        self._book = Book([], [], [], none, none, none, np.zeros(1, dtype=np.int64))
        self._breaks = none
        self._spelled: list[str] = []
        self._depths = self._sums = np.zeros(1, dtype=np.int64)
        # The ids by their bare text, and the longest of these.
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self._longest = 0
        # Of words that were asked for: the ways to write each, and its rank. Emptied when full.
        self._ways: dict[str, bytes] = {}
        self._ranks: dict[str, int] = {}
        self.extend(texts)

    def __len__(self) -> int:
        return len(self._book.texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Add the texts of the following ids."""
        added, book = list(texts), self._book
        folded = [text.casefold() for text in added]
        bare = [_without_signs(text) for text in added]
        signed = [len(word) < len(text) for word, text in zip(bare, added, strict=True)]
        for token, word in enumerate(map(str.casefold, bare), start=len(self)):
            book.bare.append(word)
            if word:
                self._by_word[word].append(token)
                self._longest = max(self._longest, len(word))
        book.texts.extend(added)
        book.folded.extend(folded)
        self._ways, self._ranks = {}, {}
        self._breaks = _append(self._breaks, ["\n" in text for text in added])
        spelled = [
            text if text and _NO_TEXT not in text else _name(token)
            for token, text in enumerate(added, start=len(self._spelled))
        ]
        self._spelled += spelled
        self._depths = _append(self._depths, [text.count("{") - text.count("}") for text in added])
        self._sums = _append(self._sums, [sum(map(ord, filter(str.isalnum, text))) for text in spelled])
        self._book = book._replace(
            signed=_append(book.signed, signed),
            starts=_append(book.starts, [text[:1].isalnum() for text in added]),
            ends=_append(book.ends, [text[-1:].isalnum() for text in added]),
            first=_append(book.first, [ord(text[0]) if text else 0 for text in folded]),
        )

    def text(self, tokens: Tokens) -> str:
        """The text of `tokens`; ids that are unknown have none."""
        return "".join(_text(self._book.texts, token) for token in tokens.tolist())

    def spelling(self, tokens: Tokens) -> str:
        """As `text`, with a name of its own for each token that has none, or a part of a character."""
        known = len(self)
        return "".join([self._spelled[token] if 0 <= token < known else _name(token) for token in tokens.tolist()])

    def depths(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """How many more braces each token opens than it closes."""
        return self._depths.take(tokens, mode="clip")

    def sums(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """A number for the letters and digits of each token: their sum is the same in whatever order they stand."""
        return self._sums.take(tokens, mode="clip")

    def line_start(self, tokens: Tokens, place: int, most: int) -> int:
        """Where the line of `place` begins, at most `most` tokens before it."""
        low = max(0, place - most)
        at = nearest_break(tokens, low, place, self._breaks, True)
        return low if at < 0 else at + 1

    def line_end(self, tokens: Tokens, place: int, most: int) -> int:
        """The line break from `place` on, at most `most` tokens behind it."""
        high = min(len(tokens), place + most)
        at = nearest_break(tokens, place, high, self._breaks, False)
        return high if at < 0 else at

    def has_message_break(self, tokens: Tokens) -> bool:
        """Whether a message begins or ends in `tokens`."""
        return MESSAGE_BREAK in self.text(tokens)

    def rank(self, word: str) -> int:
        """How rare a folded word is in any text: the id of its token, as vocabularies are made of frequent texts first.

        A word of several tokens is rarer than any token. So is a number or a single letter, which has a low id
        whatever it stands for.
        """
        known = self._ranks.get(word)
        if known is None:
            is_rare = len(word) == 1 or any(character.isdigit() for character in word)
            known = len(self) if is_rare else min(self._by_word.get(word, ()), default=len(self))
            _remember(self._ranks, word, known)
        return known

    def words(self, tokens: Tokens, start: int, end: int) -> dict[str, None]:
        """The folded words that have a part in `[start, end)` of `tokens`, in order.

        Words that signs join are one, and also each by itself where it has letters: a part of a number says nothing.
        """
        return words_in(tokens, start, end, self._book.texts, self._book.folded, _WORD_TOKENS)

    def find(self, words: Iterable[str], tokens: Tokens, *, rare: Iterable[str] = ()) -> dict[str, list[int]] | None:
        """For each of the folded `words` the places of its first token, ascending; inside longer words it is not found.

        Words of `rare` are looked for too, but not found where they are frequent. Cost O(len(tokens)) once, then
        O(places where one of the words may begin); `None` where these are too many.
        """
        common, uncommon = dict.fromkeys(words), dict.fromkeys(rare)
        asked = [*common, *(word for word in uncommon if word not in common)]
        is_rare, ways = bytes(word in uncommon for word in asked), [self._ways_to_write(word) for word in asked]
        most_tries = _MOST_TRIES + _TRIES_PER_TOKEN * len(tokens)
        return find_words(asked, is_rare, ways, tokens, self._book, most_tries, _WORD_TOKENS)

    def _ways_to_write(self, word: str) -> bytes:
        """The tokens that may begin a word: int32 pairs of a token and where in the word its text ends, or `_WHOLE`.

        A number never stands alone: signs beside it may be part of it, so that the texts around it are looked at.
        """
        known = self._ways.get(word)
        if known is None:
            pairs = [
                (token, length)
                for length in range(1, min(len(word), self._longest + 1))
                for token in self._by_word.get(word[:length], ())
            ]
            ends_at = len(word) if word[:1].isdigit() or word[-1:].isdigit() else _WHOLE
            pairs += [(token, ends_at) for token in self._by_word.get(word, ())]
            known = array("i", chain.from_iterable(pairs)).tobytes()
            _remember(self._ways, word, known)
        return known


@compiled
def nearest_break(tokens: Tokens, start: int, end: int, breaks: npt.NDArray[np.bool_], is_last: bool) -> int:
    """Where in `[start, end)` a token holds a line break, the last or the first one; -1 where none does."""
    found = np.flatnonzero(breaks.take(tokens[start:end], mode="clip"))
    return start + int(found[-1 if is_last else 0]) if len(found) else -1


@compiled
def words_in(tokens: Tokens, start: int, end: int, texts: list[str], folded: list[str], most: int) -> dict[str, None]:
    """The words of `Lexicon.words`; one goes on for at most `most` tokens on both sides of the span."""
    end = min(end, len(tokens))
    if start >= end:
        return {}
    first, last = start, end
    while first > 0 and start - first < most and _are_joined(texts, *tokens[first - 1 : first + 1].tolist()):
        first -= 1
    while last < len(tokens) and last - end < most and _are_joined(texts, *tokens[last - 1 : last + 1].tolist()):
        last += 1
    before, here, behind = (
        "".join(_text(folded, token) for token in tokens[part].tolist())
        for part in (slice(first, start), slice(start, end), slice(end, last))
    )
    low, high = len(before), len(before) + len(here)
    text = before + here + behind
    found: dict[str, None] = {}
    for joined in _JOINED.finditer(text):
        for word in (joined, *_LETTERS.finditer(text, joined.start(), joined.end())):
            if word.start() < high and word.end() > low:
                found[word.group()] = None
    return found


@compiled
def find_words(
    words: list[str], is_rare: bytes, ways: list[bytes], tokens: Tokens, book: Book, most_tries: int, most: int
) -> dict[str, list[int]] | None:
    """The places of `Lexicon.find`.

    Args:
        words: what is looked for.
        is_rare: which of them are not found where they are frequent, as bytes of 0 and 1.
        ways: how each of them is written, from `Lexicon`.
        tokens: where.
        book: the texts of the tokens.
        most_tries: `None` is returned where more is to be looked at.
        most: tokens of one word at most.
    """
    by_token: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, each in enumerate(ways):
        pairs = array("i", each)
        for token, rest_at in zip(pairs[::2], pairs[1::2], strict=True):
            by_token[token].append((number, rest_at))
    goes_on: set[int] = set()
    search = _Search(tokens, book, most)
    table = np.zeros(len(book.texts) + 1, dtype=np.bool_)
    table[[*by_token]] = True
    places = np.flatnonzero(table.take(tokens, mode="clip")).tolist()
    times = Counter(
        number
        for place in places
        for number, rest_at in by_token[int(tokens[place])]
        if rest_at in (_WHOLE, len(words[number]))
    )
    for token, begun in by_token.items():
        begun[:] = [way for way in begun if not (is_rare[way[0]] and times[way[0]] > _FREQUENT)]
        rests = [words[number][rest_at:] for number, rest_at in begun if rest_at != _WHOLE]
        goes_on.update(_pair(token, ord(rest[0])) for rest in rests if rest)
    tried = {place: search.begun(place, by_token, words, goes_on) for place in places}
    if sum(map(len, tried.values())) > most_tries:
        return None
    found: dict[str, list[int]] = {word: [] for word in words}
    for place in places:
        for number, rest_at in by_token[int(tokens[place])]:
            if rest_at == _WHOLE and search.is_edge(place):
                found[words[number]].append(place)
        for number, rest_at in tried[place]:
            if search.begins(words[number], rest_at, place):
                found[words[number]].append(place)
    return found


class _Search:
    """What one search looks at around a place."""

    def __init__(self, tokens: Tokens, book: Book, most: int) -> None:
        self._tokens, self._book, self._most = tokens, book, most

    def begun(
        self, place: int, by_token: dict[int, list[tuple[int, int]]], words: list[str], goes_on: set[int]
    ) -> list[tuple[int, int]]:
        """The words that may begin here and go on: none where the next token says otherwise."""
        token = int(self._tokens[place])
        begun = [way for way in by_token[token] if way[1] != _WHOLE]
        is_whole = any(rest_at == len(words[number]) for number, rest_at in begun)
        return begun if is_whole or _pair(token, int(self._book.first[self._clipped(place + 1)])) in goes_on else []

    def is_edge(self, place: int) -> bool:
        """Whether neither the token before this place nor the one behind it goes on with the word."""
        here, before, after = map(self._clipped, (place, place - 1, place + 1))
        book = self._book
        return bool((book.signed[here] or not book.ends[before]) and not book.starts[after])

    def begins(self, word: str, rest_at: int, place: int) -> bool:
        """Whether the word, whose first `rest_at` characters the token at `place` has, is there and part of none."""
        following, rest = self._of(self._book.folded, place + 1), word[rest_at:]
        return rest.startswith(following[: len(rest)]) and self._stands_at(word, place)

    def _stands_at(self, word: str, place: int) -> bool:
        """Whether the word begins in the token at `place` and is part of no longer one."""
        book, bare = self._book, self._of(self._book.bare, place)
        text = bare
        for at in range(place + 1, min(place + self._most, len(self._tokens))):
            more = self._of(book.texts, at)
            if not more or more[0].isspace() or len(text) > len(word) + 1:
                break
            text += self._of(book.folded, at)
        if not text.startswith(word) or _goes_on(text[len(word) :], word[-1]):
            return False
        before = "".join(self._of(book.texts, at) for at in range(max(0, place - 2), place))
        here = self._of(book.texts, place)
        before += here[: len(here) - len(bare)]
        return not _goes_on(before[::-1], word[0])

    def _of(self, texts: list[str], place: int) -> str:
        return _text(texts, int(self._tokens[place])) if place < len(self._tokens) else ""

    def _clipped(self, place: int) -> int:
        known = len(self._book.texts)
        return min(max(int(self._tokens[place]), 0), known) if 0 <= place < len(self._tokens) else known


def _name(token: int) -> str:
    return f"{_NO_TEXT}{token};"


def _remember(known: dict[str, _V], word: str, value: _V) -> None:
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[word] = value


def _append(known: npt.NDArray[_T], added: list[Any]) -> npt.NDArray[_T]:
    """`added` in front of the last entry, which is that of a token without text."""
    return np.concatenate([known[:-1], np.array(added, dtype=known.dtype), known[-1:]])


def _pair(token: int, character: int) -> int:
    return (token * 31 + character) % _PAIRS


def _text(texts: list[str], token: int) -> str:
    return texts[token] if 0 <= token < len(texts) else ""


def _are_joined(texts: list[str], before: int, here: int) -> bool:
    """Whether no space parts two tokens."""
    left, right = _text(texts, before), _text(texts, here)
    return bool(left and right) and not left[-1].isspace() and not right[0].isspace()


def _without_signs(text: str) -> str:
    found = _SIGNS.match(text)
    return text[found.end() :] if found else text


def _goes_on(rest: str, edge: str) -> bool:
    """Whether a word whose outermost character is `edge` goes on in `rest`: 500 does in 1,500 and in 500.5."""
    if rest[:1].isalnum():
        return True
    return edge.isdigit() and rest[:1] in _NUMBER_SIGNS and rest[1:2].isdigit()
