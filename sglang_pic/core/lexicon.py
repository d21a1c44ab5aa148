"""What the text of each token is: lets the guard of changed fields find words and lines in token ids.

Words are compared without regard to case or to the spaces and signs in front of them, so that `" Alpha"`, `alpha` and
`"alpha` are one word, in whatever tokens it is written.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sglang_pic.core.tokens import Tokens

_SIGNS = re.compile(r"[\W_]+")
_LETTERS = re.compile(r"[^\W\d_]+")
# Several words that single signs join: 18:27, 2026-01-05, 3.5, job_12, main.py.
_JOINED = re.compile(r"[^\W_]+(?:[-_.:/@'+,][^\W_]+)*")
_NUMBER_SIGNS = tuple(".,:-/")
# Tokens of one word at most; longer ones are cut.
_WORD_TOKENS = 24
MESSAGE_BREAK = "\x1e\n"
"""The text to give to a token that opens or closes a message."""

# Beside the codes of characters: a word that is one token may have anything behind it.
_ANY_CHARACTER = -1
_MOST_BITS = 61
# A word whose tokens stand in more places is frequent.
_FREQUENT = 32


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
        self._breaks = np.empty(0, dtype=np.bool_)
        self._first = np.empty(0, dtype=np.int32)
        self.extend(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Add the texts of the following ids."""
        added = list(texts)
        for token, text in enumerate(added, start=len(self._texts)):
            word = _without_signs(text).casefold()
            self._words.append(word)
            if word:
                self._by_word[word].append(token)
        self._texts += added
        first = [ord(text.casefold()[0]) if text else 0 for text in added]
        self._breaks = np.append(self._breaks, np.array(["\n" in text for text in added], dtype=np.bool_))
        self._first = np.append(self._first, np.array(first, dtype=np.int32))

    def text(self, tokens: Tokens) -> str:
        """The text of `tokens`; ids that are unknown have none."""
        return "".join(map(self._text, tokens.tolist()))

    def breaks(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Which tokens hold a line break: `[len(tokens)]`."""
        return self._breaks.take(tokens, mode="clip")

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
        if start >= end:
            return {}
        offset = max(0, start - _WORD_TOKENS)
        texts = [self._text(token) for token in tokens[offset : end + _WORD_TOKENS].tolist()]
        first, last = start - offset, end - offset
        while first > 0 and _are_joined(texts[first - 1], texts[first]):
            first -= 1
        while last < len(texts) and _are_joined(texts[last - 1], texts[last]):
            last += 1
        text = "".join(texts[first:last]).casefold()
        low = len("".join(texts[first : start - offset]).casefold())
        high = low + len("".join(texts[start - offset : end - offset]).casefold())
        found: dict[str, None] = {}
        for joined in _JOINED.finditer(text):
            for word in (joined, *_LETTERS.finditer(text, joined.start(), joined.end())):
                if word.start() < high and word.end() > low:
                    found[word.group()] = None
        return found

    def find(self, words: Iterable[str], tokens: Tokens, *, rare: Iterable[str] = ()) -> dict[str, list[int]]:
        """For each of the folded `words` the places of its first token, ascending; inside longer words it is not found.

        Words of `rare` are looked for too, but not found where they are frequent. Cost O(len(tokens)) in numpy, once,
        then O(places where one of the words may begin).
        """
        found: dict[str, list[int]] = {word: [] for word in (*words, *rare)}
        starts: defaultdict[int, list[str]] = defaultdict(list)
        # The characters that may follow: any behind a word that is one token.
        following: defaultdict[int, set[int]] = defaultdict(set)
        for word in found:
            for length in range(1, len(word) + 1):
                for token in self._by_word.get(word[:length], ()):
                    starts[token].append(word)
                    following[token].add(ord(word[length]) if length < len(word) else _ANY_CHARACTER)
        places = self._candidates(following, tokens)
        begun = tokens[places].tolist()
        times = Counter(begun)
        given_up = {word for word in rare if sum(times[token] for token in self._by_word.get(word, ())) > _FREQUENT}
        asked = {token: tuple(word for word in each if word not in given_up) for token, each in starts.items()}
        for place, token in zip(places.tolist(), begun, strict=True):
            wanted = asked[token]
            if not wanted or not (text := self._word_from(tokens, place)).startswith(wanted):
                continue
            before = self._before(tokens, place)
            for word in wanted:
                ends = text.startswith(word) and not _goes_on(text[len(word) :], word[-1])
                if ends and not _goes_on(before[::-1], word[0]):
                    found[word].append(place)
        return found

    def _candidates(self, following: dict[int, set[int]], tokens: Tokens) -> npt.NDArray[np.int64]:
        """Where one of the tokens `following` stands in front of a token that begins with one of its characters."""
        characters = sorted({character for each in following.values() for character in each} - {_ANY_CHARACTER})
        bits = {character: 1 << min(bit, _MOST_BITS) for bit, character in enumerate(characters)}
        masks = np.zeros(len(self._texts) + 1, dtype=np.int64)
        for token, each in following.items():
            masks[token] = -1 if _ANY_CHARACTER in each else sum({bits[character] for character in each})
        places = np.flatnonzero(masks.take(tokens, mode="clip"))
        asked = masks[tokens[places]]
        if not characters:
            return places
        first = self._first.take(tokens[np.minimum(places + 1, len(tokens) - 1)], mode="clip")
        known = np.array(characters, dtype=np.int64)
        at = np.searchsorted(known, first).clip(max=len(known) - 1)
        seen = np.where(known[at] == first, 1 << np.minimum(at, _MOST_BITS), 0)
        return places[(asked < 0) | (asked & seen != 0)]

    def _word_from(self, tokens: Tokens, place: int) -> str:
        """The folded text from the word in the token at `place` on, up to the next space."""
        parts = [self._words[int(tokens[place])]]
        for token in tokens[place + 1 : place + _WORD_TOKENS].tolist():
            text = self._text(token)
            if text[:1].isspace():
                break
            parts.append(text.casefold())
        return "".join(parts)

    def _before(self, tokens: Tokens, place: int) -> str:
        """The end of the text in front of the word that begins in the token at `place`."""
        before = "".join(map(self._text, tokens[max(0, place - 2) : place].tolist()))
        text = self._text(int(tokens[place]))
        return before + text[: len(text) - len(_without_signs(text))]

    def _text(self, token: int) -> str:
        return self._texts[token] if 0 <= token < len(self._texts) else ""


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
