"""Calls as sequences of stretches: texts that are tokenised once, and found again in every later call."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pic_traces.encode.encoded import Part, Tokens

__all__ = ["Mark", "TokenizedCache", "TokenizedCall", "TokenizedText"]

# Tokens that a cache keeps: three times the distinct tokens of 115 recorded sessions with 403 M prompt tokens. About
# 12 bytes a token, all included.
_MAX_CACHED = 32_000_000


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A stretch of text and its tokens."""

    text: str
    ids: Tokens
    starts: Tokens
    """`starts[i]`: the first character of `text` that begins in token i or later. Non-decreasing, as long as `ids`.
    A character that takes several tokens belongs to the first of them."""


class Mark(NamedTuple):
    """From character `at` of the prompt's text on, up to the next mark, a message of this role."""

    at: int
    role: str


class TokenizedCache:
    """Segments by their text; the least recently used ones go when all together pass `max_tokens`."""

    def __init__(self, make: Callable[[str], TokenizedText], max_tokens: int = _MAX_CACHED) -> None:
        self._make = make
        self._max_tokens = max_tokens
        self._stretches: OrderedDict[str, TokenizedText] = OrderedDict()
        self._num_tokens = 0

    def get(self, text: str) -> TokenizedText:
        """The stretch of a text, made anew or kept from before."""
        stretch = self._stretches.get(text)
        if stretch is not None:
            self._stretches.move_to_end(text)
            return stretch
        stretch = self._make(text)
        self._stretches[text] = stretch
        self._num_tokens += len(stretch.ids)
        while self._num_tokens > self._max_tokens and len(self._stretches) > 1:
            _, oldest = self._stretches.popitem(last=False)
            self._num_tokens -= len(oldest.ids)
        return stretch


class TokenizedCall:
    """An `EncodedCall` of tokenised stretches of text: those of the prompt, and those of the answer on its path.

    Args:
        marks: gives the marks of the prompt, in order; asked once, when `parts` is. What is in front of the first mark
            belongs to it.
    """

    def __init__(
        self, prompt: Sequence[TokenizedText], answer: Sequence[TokenizedText], marks: Callable[[], list[Mark]]
    ) -> None:
        self._stretches = [*prompt, *answer]
        self._num_prompt = len(prompt)
        self._marks = marks

    @cached_property
    def tokens(self) -> Tokens:
        """The prompt, as the server would prefill it."""
        return self.path[: self._token_ends[self._num_prompt]]

    @cached_property
    def path(self) -> Tokens:
        """The prompt and the recorded answer."""
        if not self._stretches:
            return np.empty(0, np.int32)
        return np.concatenate([stretch.ids for stretch in self._stretches])

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The messages of the prompt in order; they tile it. A token belongs where it begins."""
        marks = self._marks()
        cuts = [self._token_at(mark.at) for mark in marks[1:]]
        bounds = [0, *(min(cut, len(self.tokens)) for cut in cuts), len(self.tokens)]
        return tuple(
            Part(start, end, mark.role)
            for start, end, mark in zip(bounds, bounds[1:], marks, strict=False)
            if start < end
        )

    def text(self, start: int, end: int) -> str:
        """The text of `path[start:end]`; a character cut by `start` or `end` belongs to the token it begins in."""
        if not 0 <= start <= end <= self._token_ends[-1]:
            raise IndexError(f"tokens [{start}, {end}) of a path of {self._token_ends[-1]}")
        pieces = []
        number = max(0, bisect_left(self._token_ends, start + 1) - 1)
        while number < len(self._stretches) and self._token_ends[number] < end:
            stretch, offset = self._stretches[number], self._token_ends[number]
            pieces.append(stretch.text[_char_of(stretch, start - offset) : _char_of(stretch, end - offset)])
            number += 1
        return "".join(pieces)

    @cached_property
    def _token_ends(self) -> list[int]:
        """Tokens before each stretch, and in all."""
        return list(accumulate((len(stretch.ids) for stretch in self._stretches), initial=0))

    @cached_property
    def _char_ends(self) -> list[int]:
        return list(accumulate((len(stretch.text) for stretch in self._stretches), initial=0))

    def _token_at(self, char: int) -> int:
        """The first token that begins at `char` or later."""
        number = max(0, bisect_left(self._char_ends, char + 1) - 1)
        if number >= len(self._stretches):
            return self._token_ends[-1]
        stretch = self._stretches[number]
        return self._token_ends[number] + int(np.searchsorted(stretch.starts, char - self._char_ends[number]))


def _char_of(stretch: TokenizedText, token: int) -> int:
    """The first character that begins in `token` or later; tokens outside the stretch are taken as its ends."""
    if token <= 0:
        return 0
    return int(stretch.starts[token]) if token < len(stretch.ids) else len(stretch.text)
