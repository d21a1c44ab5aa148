"""What a call looks like to a model: token ids, and where its messages and its text lie in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from pic_traces.encode.tokenized import TokenizedText, Tokens
from pic_traces.session import Call


class Mark(NamedTuple):
    """A message of this role, from character `at` of the prompt's text up to the next mark."""

    at: int
    role: str


class Part(NamedTuple):
    """Tokens `[start, end)` of a prompt, which belong to one message, with the template's own tokens around it."""

    start: int
    end: int
    role: str
    """The message's role; `template` for what belongs to no message (a default system prompt, a generation prompt)."""


class Encoder(Protocol):
    """Turns calls into token ids, the same call always into the same ids.

    Args:
        name: what the ids are of, for reports: the tokenizer's folder, or what stands in for one.
        is_exact: whether these are the ids of a model's own tokenizer and template, not an approximation.
        delimiters: ids of the tokens that open or close a message.
    """

    name: str
    is_exact: bool
    delimiters: frozenset[int]

    @property
    def texts(self) -> Sequence[str]:
        """The text of each token by its id; it grows where calls bring new tokens."""

    @property
    def notes(self) -> tuple[str, ...]:
        """How the calls so far differ from what a server would be sent, for reports; empty if they do not."""

    def encode(self, call: Call) -> EncodedCall:
        """The ids of one call.

        Raises:
            TraceError: the template refuses the messages; the error names session and call.
        """


class EncodedCall:
    """One call as token ids, made of tokenised stretches of text: the prompt's, and the answer's on its path.

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
        """The prompt and the recorded answer: what a prefix cache holds when the call has ended."""
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
