"""What the text of each token is: lets the guard of changed fields find words and lines in token ids.

Words are compared without regard to case or to the spaces and signs in front of them, so that `" Alpha"`, `alpha` and
`"alpha` are one word, in whatever tokens it is written.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_pic.core.tokens import Tokens

_T = TypeVar("_T", bound=np.generic)
_Number = int | npt.NDArray[np.integer[Any]]

_SIGNS = re.compile(r"[\W_]+")
_LETTERS = re.compile(r"[^\W\d_]+")
# Several words that single signs join: 18:27, 2026-01-05, 3.5, job_12, main.py.
_JOINED = re.compile(r"[^\W_]+(?:[-_.:/@'+,][^\W_]+)*")
_NUMBER_SIGNS = tuple(".,:-/")
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


class Lexicon:
    """The texts of a vocabulary.

    Args:
        texts: by token id, with the spaces that belong to a token; `MESSAGE_BREAK` for one that opens or closes a
            message.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[str] = []
        # Without the signs in front, folded; and the ids by that.
        self._words: list[str] = []
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self._longest = 0
        # Of each token, and at the end of one without text: whether it has a line break or signs in front, begins or
        # ends inside a word; and its first character.
        self._breaks, self._signed, self._starts, self._ends = np.zeros((4, 1), dtype=np.bool_)
        self._first = np.zeros(1, dtype=np.int64)
        self.extend(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Add the texts of the following ids."""
        added = list(texts)
        signed = []
        for token, text in enumerate(added, start=len(self._texts)):
            bare = _without_signs(text)
            signed.append(len(bare) < len(text))
            word = bare.casefold()
            self._words.append(word)
            if word:
                self._by_word[word].append(token)
                self._longest = max(self._longest, len(word))
        folded = [text.casefold() for text in added]
        self._texts += added
        self._breaks = _append(self._breaks, ["\n" in text for text in added])
        self._signed = _append(self._signed, signed)
        self._starts = _append(self._starts, [text[:1].isalnum() for text in added])
        self._ends = _append(self._ends, [text[-1:].isalnum() for text in added])
        self._first = _append(self._first, [ord(text[0]) if text else 0 for text in folded])

    def text(self, tokens: Tokens) -> str:
        """The text of `tokens`; ids that are unknown have none."""
        return "".join(map(self._text, tokens.tolist()))

    def breaks(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Which tokens hold a line break: `[len(tokens)]`."""
        return self._breaks.take(tokens, mode="clip")

    def line_start(self, tokens: Tokens, place: int, most: int) -> int:
        """Where the line of `place` begins, at most `most` tokens before it."""
        low = max(0, place - most)
        breaks = np.flatnonzero(self.breaks(tokens[low:place]))
        return low + int(breaks[-1]) + 1 if len(breaks) else low

    def line_end(self, tokens: Tokens, place: int, most: int) -> int:
        """The line break from `place` on, at most `most` tokens behind it."""
        high = min(len(tokens), place + most)
        breaks = np.flatnonzero(self.breaks(tokens[place:high]))
        return place + int(breaks[0]) if len(breaks) else high

    def has_message_break(self, tokens: Tokens) -> bool:
        """Whether a message begins or ends in `tokens`."""
        return MESSAGE_BREAK in self.text(tokens)

    def rank(self, word: str) -> int:
        """How rare a folded word is in any text: the id of its token, as vocabularies are made of frequent texts first.

        A word of several tokens is rarer than any token. So is a number or a single letter, which has a low id
        whatever it stands for.
        """
        if len(word) == 1 or any(character.isdigit() for character in word):
            return len(self._texts)
        return min(self._by_word.get(word, ()), default=len(self._texts))

    def words(self, tokens: Tokens, start: int, end: int) -> dict[str, None]:
        """The folded words that have a part in `[start, end)` of `tokens`, in order.

        Words that signs join are one, and also each by itself where it has letters: a part of a number says nothing.
        """
        inside = [self._text(token) for token in tokens[start:end].tolist()]
        if not inside:
            return {}
        left, right = [inside[0]], [inside[-1]]
        for token in tokens[max(0, start - _WORD_TOKENS) : start][::-1].tolist():
            if not _are_joined(self._text(token), left[-1]):
                break
            left.append(self._text(token))
        for token in tokens[end : end + _WORD_TOKENS].tolist():
            if not _are_joined(right[-1], self._text(token)):
                break
            right.append(self._text(token))
        before, here = "".join(left[:0:-1]).casefold(), "".join(inside).casefold()
        text, low = before + here + "".join(right[1:]).casefold(), len(before)
        high = low + len(here)
        found: dict[str, None] = {}
        for joined in _JOINED.finditer(text):
            for word in (joined, *_LETTERS.finditer(text, joined.start(), joined.end())):
                if word.start() < high and word.end() > low:
                    found[word.group()] = None
        return found

    def find(self, words: Iterable[str], tokens: Tokens, *, rare: Iterable[str] = ()) -> dict[str, list[int]] | None:
        """For each of the folded `words` the places of its first token, ascending; inside longer words it is not found.

        Words of `rare` are looked for too, but not found where they are frequent. Cost O(len(tokens)) in numpy, once,
        then O(places where one of the words may begin); `None` where these are too many.
        """
        found: dict[str, list[int]] = {word: [] for word in (*words, *rare)}
        whole, begun = self._ways_to_write(found)
        places = np.flatnonzero(self._table([*whole, *begun]).take(tokens, mode="clip"))
        times = Counter(tokens[places].tolist())
        given_up = {word for word in rare if sum(times[token] for token in self._by_word.get(word, ())) > _FREQUENT}
        if given_up:
            whole, begun = self._ways_to_write(word for word in found if word not in given_up)
            places = places[self._table([*whole, *begun]).take(tokens[places], mode="clip")]
        ids = tokens[places]
        before, after = (tokens.take(places + step, mode="clip") for step in (-1, 1))
        # Beyond both ends there is no text.
        before[places == 0] = after[places == len(tokens) - 1] = len(self._texts)
        is_edge = self._signed.take(ids, mode="clip") | ~self._ends.take(before, mode="clip")
        is_edge &= ~self._starts.take(after, mode="clip") & self._table([*whole]).take(ids, mode="clip")
        for place, token in zip(places[is_edge].tolist(), ids[is_edge].tolist(), strict=True):
            found[whole[token]].append(place)
        may_begin = self._may_begin(begun, ids, after)
        starts = ids[may_begin].tolist()
        if sum(len(begun[token]) for token in starts) > _MOST_TRIES + _TRIES_PER_TOKEN * len(tokens):
            return None
        for place, token, next_token in zip(places[may_begin].tolist(), starts, after[may_begin].tolist(), strict=True):
            following = self._text(next_token).casefold()
            for word, rest in begun[token]:
                if rest.startswith(following[: len(rest)]) and self._stands_at(word, tokens, place):
                    found[word].append(place)
        return {word: sorted(each) for word, each in found.items()}

    def _table(self, ids: list[int]) -> npt.NDArray[np.bool_]:
        """Which tokens are one of `ids`."""
        table = np.zeros(len(self._texts) + 1, dtype=np.bool_)
        table[ids] = True
        return table

    def _ways_to_write(self, words: Iterable[str]) -> tuple[dict[int, str], dict[int, list[tuple[str, str]]]]:
        """The tokens that are one of the words; and those that may begin one, each with the rest of the word.

        A number is of the second kind: signs beside it may be part of it, so that the texts around it are looked at.
        """
        whole: dict[int, str] = {}
        begun: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        for word in words:
            for length in range(1, min(len(word), self._longest + 1)):
                for token in self._by_word.get(word[:length], ()):
                    begun[token].append((word, word[length:]))
            for token in self._by_word.get(word, ()):
                if word[0].isdigit() or word[-1].isdigit():
                    begun[token].append((word, ""))
                else:
                    whole[token] = word
        return whole, begun

    def _may_begin(self, begun: dict[int, list[tuple[str, str]]], ids: Tokens, after: Tokens) -> npt.NDArray[np.bool_]:
        """Which of the tokens `ids` may begin a word, but few that go on otherwise in the tokens `after` them."""
        goes_on = np.zeros(_PAIRS, dtype=np.bool_)
        goes_on[[_pair(token, ord(rest[0])) for token, words in begun.items() for _, rest in words if rest]] = True
        ended = [token for token, words in begun.items() if any(not rest for _, rest in words)]
        may_begin: npt.NDArray[np.bool_] = goes_on[_pair(ids, self._first.take(after, mode="clip"))]
        may_begin &= self._table([*begun]).take(ids, mode="clip")
        may_begin |= self._table(ended).take(ids, mode="clip")
        return may_begin

    def _stands_at(self, word: str, tokens: Tokens, place: int) -> bool:
        """Whether the word begins in the token at `place` and is part of no longer one."""
        text = self._words[int(tokens[place])]
        for token in tokens[place + 1 : place + _WORD_TOKENS].tolist():
            more = self._text(token)
            if not more or more[0].isspace() or len(text) > len(word) + 1:
                break
            text += more.casefold()
        if not text.startswith(word) or _goes_on(text[len(word) :], word[-1]):
            return False
        before = "".join(map(self._text, tokens[max(0, place - 2) : place].tolist()))
        token = int(tokens[place])
        before += self._texts[token][: len(self._texts[token]) - len(self._words[token])]
        return not _goes_on(before[::-1], word[0])

    def _text(self, token: int) -> str:
        return self._texts[token] if 0 <= token < len(self._texts) else ""


def _append(known: npt.NDArray[_T], added: list[Any]) -> npt.NDArray[_T]:
    """`added` in front of the last entry, which is that of a token without text."""
    return np.concatenate([known[:-1], np.array(added, dtype=known.dtype), known[-1:]])


def _pair(token: _Number, character: _Number) -> Any:
    return (token * 31 + character) % _PAIRS


def _are_joined(before: str, here: str) -> bool:
    """Whether no space parts two tokens."""
    return bool(before and here) and not before[-1].isspace() and not here[0].isspace()


def _without_signs(text: str) -> str:
    found = _SIGNS.match(text)
    return text[found.end() :] if found else text


def _goes_on(rest: str, edge: str) -> bool:
    """Whether a word whose outermost character is `edge` goes on in `rest`: 500 does in 1,500 and in 500.5."""
    if rest[:1].isalnum():
        return True
    return edge.isdigit() and rest[:1] in _NUMBER_SIGNS and rest[1:2].isdigit()
