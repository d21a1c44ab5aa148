"""Calls as sequences of segments: texts that are tokenised once, and found again in every later call."""

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

__all__ = ["Mark", "Segment", "SegmentCache", "SegmentedCall"]

# Tokens that a cache keeps: three times the distinct tokens of 115 recorded sessions with 403 M prompt tokens. About
# 12 bytes a token, all included.
_MAX_CACHED = 32_000_000


@dataclass(frozen=True, slots=True)
class Segment:
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


class SegmentCache:
    """Segments by their text; the least recently used ones go when all together pass `max_tokens`."""

    def __init__(self, make: Callable[[str], Segment], max_tokens: int = _MAX_CACHED) -> None:
        self._make = make
        self._max_tokens = max_tokens
        self._segments: OrderedDict[str, Segment] = OrderedDict()
        self._num_tokens = 0

    def get(self, text: str) -> Segment:
        """The segment of a text, made anew or kept from before."""
        segment = self._segments.get(text)
        if segment is not None:
            self._segments.move_to_end(text)
            return segment
        segment = self._make(text)
        self._segments[text] = segment
        self._num_tokens += len(segment.ids)
        while self._num_tokens > self._max_tokens and len(self._segments) > 1:
            _, oldest = self._segments.popitem(last=False)
            self._num_tokens -= len(oldest.ids)
        return segment


class SegmentedCall:
    """An `EncodedCall` whose prompt is the segments `prompt`, and whose answer, on its path, is the segments `answer`.

    Args:
        marks: gives the marks of the prompt, in order; asked once, when `parts` is. What is in front of the first mark
            belongs to it.
    """

    def __init__(self, prompt: Sequence[Segment], answer: Sequence[Segment], marks: Callable[[], list[Mark]]) -> None:
        self._segments = [*prompt, *answer]
        self._num_prompt = len(prompt)
        self._marks = marks

    @cached_property
    def tokens(self) -> Tokens:
        """The prompt, as the server would prefill it."""
        return self.path[: self._token_ends[self._num_prompt]]

    @cached_property
    def path(self) -> Tokens:
        """The prompt and the recorded answer."""
        if not self._segments:
            return np.empty(0, np.int32)
        return np.concatenate([segment.ids for segment in self._segments])

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
        while number < len(self._segments) and self._token_ends[number] < end:
            segment, offset = self._segments[number], self._token_ends[number]
            pieces.append(segment.text[_char_of(segment, start - offset) : _char_of(segment, end - offset)])
            number += 1
        return "".join(pieces)

    @cached_property
    def _token_ends(self) -> list[int]:
        """Tokens before each segment, and in all."""
        return list(accumulate((len(segment.ids) for segment in self._segments), initial=0))

    @cached_property
    def _char_ends(self) -> list[int]:
        return list(accumulate((len(segment.text) for segment in self._segments), initial=0))

    def _token_at(self, char: int) -> int:
        """The first token that begins at `char` or later."""
        number = max(0, bisect_left(self._char_ends, char + 1) - 1)
        if number >= len(self._segments):
            return self._token_ends[-1]
        segment = self._segments[number]
        return self._token_ends[number] + int(np.searchsorted(segment.starts, char - self._char_ends[number]))


def _char_of(segment: Segment, token: int) -> int:
    """The first character that begins in `token` or later; tokens outside the segment are taken as its ends."""
    if token <= 0:
        return 0
    return int(segment.starts[token]) if token < len(segment.ids) else len(segment.text)
