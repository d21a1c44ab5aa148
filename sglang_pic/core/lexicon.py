"""The texts of a vocabulary's tokens: the guard of changed fields finds words and lines in token ids with it.

Words are compared without case and without the spaces and signs before them, so `" Alpha"`, `alpha` and `"alpha` are
one word, however it is tokenized.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from sglang_pic.core import word_loops
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens
from sglang_pic.core.word_loops import (
    ALNUM,
    CLOSED,
    DECIMAL,
    DIGIT,
    ENDS,
    ESCAPE,
    ESCAPED,
    IN_NUMBER,
    JOINT,
    OPEN,
    SIGNED,
    STARTS,
    WHOLE,
    Asked,
    Book,
)

_T = TypeVar("_T", bound=np.generic)
_V = TypeVar("_V")

_SIGNS = re.compile(r"[\W_]+")
# They join words: 18:27, 2026-01-05, 3.5, job_12, main.py.
_JOINTS = "-_.:/@'+"
_NUMBER_SIGNS = ".:-/"
# Tokens that a word may have beyond a field on either side; longer ones are cut. An id has 40, a signed token hundreds.
WORD_TOKENS = 512
# Kana, also of half width, and Chinese signs.
_WITHOUT_SPACES = (
    *(("\u3040", "\u30ff"), ("\u3400", "\u9fff"), ("\uf900", "\ufaff")),
    *(("\uff66", "\uff9f"), ("\U00020000", "\U0003ffff")),
)
_ESCAPES = ("\\n", "\\r", "\\t")
MESSAGE_BREAK = "\x1e\n"
"""The text to give to a token that opens or closes a message."""

# Tries of one search: places where a word of several tokens may begin, times such words; a constant, and more for each
# token of the text. Plans of recorded sessions need up to 251.
_MOST_TRIES = 1 << 15
_TRIES_PER_TOKEN = 1
_MOST_REMEMBERED = 1 << 16


class _Written(NamedTuple):
    """The tokens that may begin a word: arrays of int32, in bytes."""

    points: bytes
    """The word's characters."""
    first: int
    """The kinds of its first character."""
    last: int
    tokens: bytes
    """Tokens that may begin it."""
    rests: bytes
    """For each of them where its text ends in the word; `WHOLE` if it is the whole word."""


class Lexicon:
    """The texts of a vocabulary.

    Args:
        texts: by token id, with the spaces that belong to a token; `MESSAGE_BREAK` for one that opens or closes a
            message.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[str] = []
        self._folded: list[str] = []
        nothing, none = np.zeros(0, np.int32), np.zeros(0, np.uint8)
        places, zero = np.zeros(2, np.int32), np.zeros(1, np.int32)
        self._breaks, self._message_breaks = np.zeros(1, np.uint8), set[int]()
        self._book = Book(none, places, nothing, none, places, zero, zero, zero, self._breaks)
        # For searches: zeros between them.
        self._heads = nothing
        # The ids by their bare text, and the longest of these.
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self._longest = 0
        # Caches by word; emptied when full.
        self._ways: dict[str, _Written] = {}
        self._ranks: dict[str, int] = {}
        self.extend(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Add the texts of the following ids."""
        added, book = list(texts), self._book
        if not added:
            return
        bare = [_without_signs(text) for text in added]
        signs = [len(text) - len(word) for word, text in zip(bare, added, strict=True)]
        usual = {ord(character): _usual(character) for character in set("".join(added)) if not character.isascii()}
        folded, bare = ([text.translate(usual).casefold() for text in texts] for texts in (added, bare))
        for token, word in enumerate(bare, start=len(self)):
            if word:
                self._by_word[word].append(token)
                self._longest = max(self._longest, len(word))
        self._texts += added
        self._folded += folded
        self._heads = np.zeros(len(self), np.int32)
        self._ways, self._ranks = {}, {}
        self._breaks = _append(self._breaks, ["\n" in text for text in added])
        self._message_breaks = {token for token, text in enumerate(self._texts) if text == MESSAGE_BREAK}
        text, folded_text = "".join(added), "".join(folded)
        self._book = Book(
            kinds=np.concatenate([book.kinds, _kinds(text)]),
            kinds_at=_lay_out(book.kinds_at, added),
            folded=np.concatenate([book.folded, _points(folded_text)]),
            folded_kinds=np.concatenate([book.folded_kinds, _kinds(folded_text)]),
            folded_at=_lay_out(book.folded_at, folded),
            bare_len=_append(book.bare_len, [*map(len, bare)]),
            signs_len=_append(book.signs_len, signs),
            first=_append(book.first, [ord(text[0]) if text else 0 for text in folded]),
            marks=_append(book.marks, [*map(_marks, added, map(bool, signs))]),
        )

    def text(self, tokens: Tokens) -> str:
        """The text of `tokens`; unknown ids have none."""
        return "".join(_text(self._texts, token) for token in tokens.tolist())

    def line_start(self, tokens: Tokens, place: int, most: int) -> int:
        """The start of the line of `place`, at most `most` tokens before it."""
        low = max(0, place - most)
        at = word_loops.nearest_break(tokens, low, place, self._breaks, 1)
        return low if at < 0 else at + 1

    def line_end(self, tokens: Tokens, place: int, most: int) -> int:
        """The first line break from `place` on, at most `most` tokens after it."""
        high = min(len(tokens), place + most)
        at = word_loops.nearest_break(tokens, place, high, self._breaks, 0)
        return high if at < 0 else at

    def has_message_break(self, tokens: Tokens) -> bool:
        """Whether a message begins or ends in `tokens`."""
        return not self._message_breaks.isdisjoint(tokens.tolist())

    def is_joint(self, tokens: Tokens) -> bool:
        """Whether what is before and after these tokens is one word: their text has no space."""
        return not any(map(str.isspace, self.text(tokens)))

    def message_breaks(self, tokens: Tokens) -> tuple[int, int]:
        """The first and the last place where a message begins or ends; the length and -1 if there is none."""
        places = [at for at, token in enumerate(tokens.tolist()) if token in self._message_breaks]
        return (places[0], places[-1]) if places else (len(tokens), -1)

    def rank(self, word: str) -> int:
        """How rare a folded word is in any text: the id of its token, because vocabularies begin with frequent texts.

        A word of several tokens, a number and a single letter are rarer than any token.
        """
        known = self._ranks.get(word)
        if known is None:
            is_rare = len(word) == 1 or any(character.isdigit() for character in word)
            known = len(self) if is_rare else min(self._by_word.get(word, ()), default=len(self))
            _remember(self._ranks, word, known)
        return known

    def words(self, tokens: Tokens, start: int, end: int) -> dict[str, None]:
        """The folded words that overlap `[start, end)` of `tokens`, in order.

        Words joined by signs count as one word; those with letters, and longer numbers, also by themselves.
        """
        end, book = min(end, len(tokens)), self._book
        if start >= end:
            return {}
        first, last, spans = word_loops.word_spans(
            tokens, start, end, book.folded_at, book.folded_kinds, book.marks, WORD_TOKENS
        )
        folded, known = self._folded, len(self)
        text = "".join([folded[token] if 0 <= token < known else "" for token in tokens[first:last].tolist()])
        bounds = iter(spans.tolist())
        return {text[begin:stop]: None for begin, stop in zip(bounds, bounds, strict=True)}

    def find(self, words: Iterable[str], tokens: Tokens, *, rare: Iterable[str] = ()) -> dict[str, list[int]] | None:
        """For each of the folded `words` the places of its first token, ascending; parts of longer words do not count.

        Words of `rare` get places only if they are not frequent in `tokens`. Cost O(len(tokens)), and O(places where
        one of the words may begin); `None` if these are too many.
        """
        common, uncommon = dict.fromkeys(words), dict.fromkeys(rare)
        asked = [*common, *(word for word in uncommon if word not in common)]
        if not asked:
            return {}
        written = [self._written(word) for word in asked]
        points, first, last, tokens_of, rests = zip(*written, strict=True)
        words_asked = Asked(
            words=np.frombuffer(b"".join(points), np.int32),
            at=np.array([*accumulate(map(len, asked), initial=0)], np.int32),
            is_rare=np.frombuffer(bytes(word in uncommon for word in asked), np.uint8),
            first=np.frombuffer(bytes(first), np.uint8),
            last=np.frombuffer(bytes(last), np.uint8),
            way_words=np.arange(len(asked), dtype=np.int32).repeat([len(each) // TOKEN_BYTES for each in rests]),
            way_tokens=np.frombuffer(b"".join(tokens_of), np.int32),
            way_rests=np.frombuffer(b"".join(rests), np.int32),
        )
        most_tries = _MOST_TRIES + _TRIES_PER_TOKEN * len(tokens)
        places, ends, num_tries = word_loops.find_words(
            tokens, self._heads, tuple(words_asked), tuple(self._book), most_tries
        )
        if num_tries > most_tries:
            return None
        found, bounds = places.tolist(), [0, *ends.tolist()]
        return {word: found[start:end] for word, (start, end) in zip(asked, pairwise(bounds), strict=True)}

    def _written(self, word: str) -> _Written:
        """How a word is written. A number is never `WHOLE`, because signs beside it may be part of it."""
        known = self._ways.get(word)
        if known is None:
            pairs = [
                (token, length)
                for length in range(1, min(len(word), self._longest + 1))
                for token in self._by_word.get(word[:length], ())
            ]
            ends_at = len(word) if word[:1].isdigit() or word[-1:].isdigit() else WHOLE
            pairs += [(token, ends_at) for token in self._by_word.get(word, ())]
            tokens, rests = (array("i", [pair[i] for pair in pairs]).tobytes() for i in (0, 1))
            known = _Written(_points(word).tobytes(), _kind(word[0]), _kind(word[-1]), tokens, rests)
            _remember(self._ways, word, known)
        return known


def _remember(known: dict[str, _V], word: str, value: _V) -> None:
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[word] = value


def _append(known: npt.NDArray[_T], added: list[Any]) -> npt.NDArray[_T]:
    """`known` with `added` before its last entry, that of a token without text."""
    return np.concatenate([known[:-1], np.array(added, dtype=known.dtype), known[-1:]])


def _text(texts: list[str], token: int) -> str:
    return texts[token] if 0 <= token < len(texts) else ""


def _usual(character: str) -> str:
    """The usual form of a letter or digit, such as one of full width; no signs for letters, no digits for fractions."""
    usual, kinds = normalize("NFKC", character), ALNUM | DECIMAL | JOINT
    return usual if all(_kind(each) & kinds == _kind(character) & kinds for each in usual) else character


def _without_signs(text: str) -> str:
    found = _SIGNS.match(text)
    return text[found.end() :] if found else text


def _lay_out(places: npt.NDArray[np.int32], texts: list[str]) -> npt.NDArray[np.int32]:
    """The offsets of concatenated texts, with `texts` added; the last one is the empty text."""
    ends = places[-1] + np.cumsum([*map(len, texts)])
    return np.concatenate([places[:-1], ends, ends[-1:]]).astype(np.int32)


def _marks(text: str, is_signed: bool) -> int:
    # A line break in JSON ends no word.
    starts, ends = STARTS * _is_alnum(text[:1]), ENDS * (_is_alnum(text[-1:]) and text[-2:] not in _ESCAPES)
    is_open, is_closed = (bool(edge) and not edge.isspace() for edge in (text[:1], text[-1:]))
    return SIGNED * is_signed + starts + ends + OPEN * is_open + CLOSED * is_closed


def _points(text: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def _kinds(text: str) -> npt.NDArray[np.uint8]:
    """The kinds of each character."""
    table = np.zeros(ord(max(text, default="\0")) + 1, np.uint8)
    for character in set(text):
        table[ord(character)] = _kind(character)
    return table[_points(text)]


def _is_alnum(character: str) -> bool:
    """Whether it is part of a word; Chinese and Japanese are written without spaces, so their signs are none."""
    if not character.isalnum() or character < "\u3040":
        return character.isalnum()
    return not any(first <= character <= last for first, last in _WITHOUT_SPACES)


def without_spaces(text: str) -> str:
    """The characters of a text in scripts without spaces."""
    return "".join(character for character in text if character.isalnum() and not _is_alnum(character))


def _kind(character: str) -> int:
    return (
        ALNUM * _is_alnum(character)
        + DECIMAL * character.isdecimal()
        + DIGIT * character.isdigit()
        + JOINT * (character in _JOINTS)
        + IN_NUMBER * (character in _NUMBER_SIGNS)
        + ESCAPE * (character == "\\")
        + ESCAPED * (character in "nrt")
    )
