"""What the text of each token is: lets the guard of changed fields find words and lines in token ids.

Words are compared without regard to case or to the spaces and signs in front of them, so that `" Alpha"`, `alpha` and
`"alpha` are one word, in whatever tokens it is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sglang_pic.core.tokens import Tokens

_SIGNS = re.compile(r"[\W_]+")
_WORD = re.compile(r"[^\W_]+")
# Several words that single signs join: 18:27, 2026-01-05, 3.5, job_12, main.py.
_JOINED = re.compile(r"[^\W_]+(?:[-_.:/@'+,][^\W_]+)*")
_NUMBER_SIGNS = tuple(".,:-/")
# Tokens of one word at most; longer ones are cut.
_WORD_TOKENS = 24
# Beside the codes of characters.
_NO_TOKEN, _ANY_CHARACTER = -2, -1


class Lexicon:
    """The texts of a vocabulary.

    Args:
        texts: by token id, with the spaces that belong to a token; a token that opens or closes a message is a line
            break.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[str] = []
        self._breaks = np.empty(0, dtype=np.bool_)
        self._first = np.empty(0, dtype=np.int32)
        # Ids by their text without the signs in front, folded.
        self._by_word: defaultdict[str, list[int]] = defaultdict(list)
        self.extend(texts)

    def __len__(self) -> int:
        return len(self._texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Add the texts of the following ids."""
        added = list(texts)
        for token, text in enumerate(added, start=len(self._texts)):
            if word := _without_signs(text).casefold():
                self._by_word[word].append(token)
        self._texts += added
        self._breaks = np.append(self._breaks, ["\n" in text for text in added])
        self._first = np.append(self._first, [ord(text.casefold()[0]) if text else 0 for text in added])

    def text(self, tokens: Tokens) -> str:
        """The text of `tokens`; ids that are unknown have none."""
        texts = self._texts
        return "".join([texts[token] if 0 <= token < len(texts) else "" for token in tokens.tolist()])

    def breaks(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Which tokens hold a line break: `[len(tokens)]`."""
        return self._breaks.take(tokens, mode="clip")

    def words(self, tokens: Tokens, start: int, end: int) -> dict[str, None]:
        """The folded words that have a part in `[start, end)` of `tokens`, in order; joined ones also one by one."""
        if start >= end:
            return {}
        first, last = start, end
        while first > max(0, start - _WORD_TOKENS) and self._is_joined(tokens, first):
            first -= 1
        while last < min(len(tokens), end + _WORD_TOKENS) and self._is_joined(tokens, last):
            last += 1
        text = self.text(tokens[first:last]).casefold()
        low = len(self.text(tokens[first:start]).casefold())
        high = low + len(self.text(tokens[start:end]).casefold())
        found: dict[str, None] = {}
        for joined in _JOINED.finditer(text):
            for word in (joined, *_WORD.finditer(text, joined.start(), joined.end())):
                if word.start() < high and word.end() > low:
                    found[word.group()] = None
        return found

    def find(self, words: Iterable[str], tokens: Tokens) -> dict[str, list[int]]:
        """For each of the folded `words` the places of its first token, ascending; inside longer words it is not found.

        Cost O(len(tokens)) in numpy, once, then O(places where one of the words may begin).
        """
        starts: defaultdict[int, list[str]] = defaultdict(list)
        # The character that the next token must begin with: that of a word which is in one token may be any.
        wanted = np.full(len(self._texts) + 1, _NO_TOKEN, dtype=np.int32)
        for word in words:
            for length in range(1, len(word) + 1):
                following = ord(word[length]) if length < len(word) else _ANY_CHARACTER
                for token in self._by_word.get(word[:length], ()):
                    starts[token].append(word)
                    wanted[token] = following if wanted[token] in (_NO_TOKEN, following) else _ANY_CHARACTER
        found: dict[str, list[int]] = {word: [] for word in words}
        asked = wanted.take(tokens, mode="clip")
        first = self._first.take(tokens[1:], mode="clip")
        asked[:-1][(asked[:-1] >= 0) & (asked[:-1] != first)] = _NO_TOKEN
        for place in np.flatnonzero(asked != _NO_TOKEN).tolist():
            before, text = self._around(tokens, place)
            for word in starts[int(tokens[place])]:
                if text.startswith(word) and _stands_alone(before, word, text[len(word) :]):
                    found[word].append(place)
        return found

    def _around(self, tokens: Tokens, place: int) -> tuple[str, str]:
        """The text before the word that begins in the token at `place`, and the folded text from the word on."""
        before = self.text(tokens[max(0, place - 2) : place])
        text = self.text(tokens[place : place + _WORD_TOKENS])
        word = _without_signs(text)
        return before + text[: len(text) - len(word)], word.casefold()

    def _is_joined(self, tokens: Tokens, place: int) -> bool:
        """Whether no space parts the token at `place` from the one before."""
        before, here = self.text(tokens[place - 1 : place]), self.text(tokens[place : place + 1])
        return bool(before and here) and not before[-1].isspace() and not here[0].isspace()


def _without_signs(text: str) -> str:
    found = _SIGNS.match(text)
    return text[found.end() :] if found else text


def _stands_alone(before: str, word: str, after: str) -> bool:
    return not _goes_on(before[::-1], word[0]) and not _goes_on(after, word[-1])


def _goes_on(rest: str, edge: str) -> bool:
    """Whether a word whose outermost character is `edge` goes on in `rest`: 500 does in 1,500 and in 500.5."""
    if rest[:1].isalnum():
        return True
    return edge.isdigit() and rest[:1] in _NUMBER_SIGNS and rest[1:2].isdigit()
