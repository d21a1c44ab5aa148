"""Finds JSON objects that differ only in the order of their keys or in whitespace.

    donor    {"required": ["a"], "properties": {...}, "type": "object"}
    prompt   {"type": "object", "properties": {...}, "required": ["a"]}

Whole objects are compared as values. Order counts in lists, strings and prose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from sglang_pic.core.alignment import Difference
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import Node, tokens_between

# An object begins at most so many tokens before a difference, and ends at most so many after it.
_REACH_TOKENS = 1024
# At most so many nested objects are compared.
_MOST_LEVELS = 6
# Tokens that one plan may read: a constant, and more for each token of the prompt; the cost of a search in tokens.
_MOST_READ, _READ_PER_TOKEN, _READ_PER_SEARCH = 1 << 14, 16, 512


class _Side(NamedTuple):
    """The text around a difference, in the prompt or on the donor's path."""

    tokens: Tokens
    start: int
    """Where the difference begins in `tokens`."""
    end: int


class _Braces(NamedTuple):
    """The tokens from an open brace to the one that closes it."""

    start: int
    end: int
    total: int
    """A sum over their letters and digits."""


class KeyOrder:
    """Compares the objects of one prompt with donors'.

    Args:
        tokens: the prompt.
        lexicon: the texts of the tokens.
    """

    def __init__(self, tokens: Tokens, lexicon: Lexicon) -> None:
        self._tokens, self._lexicon = tokens, lexicon
        self._left_to_read = _MOST_READ + _READ_PER_TOKEN * len(tokens)

    def alone_differs(self, field: Difference, node: Node) -> bool:
        """Whether an object around the difference has the same value in the prompt and on the path to `node`.

        `False` if comparing would take too long.
        """
        start, end = field.new
        old_start, old_end = field.old_start, field.old_start + len(field.old)
        low, old_low = (max(0, each - _REACH_TOKENS) for each in (start, old_start))
        old = tokens_between(node, old_low, old_end + _REACH_TOKENS)
        sides = (
            _Side(self._tokens[low : end + _REACH_TOKENS], start - low, end - low),
            _Side(old, old_start - old_low, old_end - old_low),
        )
        self._left_to_read -= _READ_PER_SEARCH
        here = [*self._braces(sides[0])]
        there = self._braces(sides[1]) if here else ()
        return any(self._are_same(sides, pair) for pair in product(here, there) if pair[0].total == pair[1].total)

    def _braces(self, side: _Side) -> Iterator[_Braces]:
        """The braces around the difference, the innermost first."""
        depths = self._lexicon.depths(side.tokens)
        opened = np.maximum.accumulate(np.cumsum(depths[: side.start][::-1]))
        if opened.max(initial=0) <= 0:
            return
        closed = np.maximum.accumulate(np.cumsum(-depths[side.start :]))
        totals = np.cumsum(self._lexicon.sums(side.tokens))
        for level in range(1, 1 + min(_MOST_LEVELS, opened[-1], closed.max(initial=0))):
            first, last = side.start - 1 - opened.searchsorted(level), side.start + closed.searchsorted(level)
            yield _Braces(int(first), int(last) + 1, int(totals[last] - totals[first]))

    def _are_same(self, sides: tuple[_Side, _Side], braces: tuple[_Braces, _Braces]) -> bool:
        self._left_to_read -= sum(each.end - each.start for each in braces)
        if self._left_to_read < 0:
            return False
        # The common end of both is not part of the difference: it may close the object.
        same_len = _common_end(*(self._lexicon.spelling(side.tokens[side.start : side.end]) for side in sides))
        try:
            new, old = (self._value(side, each, same_len) for side, each in zip(sides, braces, strict=True))
            return new == old
        except (ValueError, RecursionError):
            return False

    def _value(self, side: _Side, braces: _Braces, same_len: int) -> object:
        """The object in the braces.

        Raises:
            ValueError: it is not JSON, or closes within the difference, whose last `same_len` characters do not count.
            RecursionError: it is nested too deeply.
        """
        parts = (braces.start, side.start), (side.start, side.end), (braces.start, braces.end)
        head, field, text = (self._lexicon.spelling(side.tokens[slice(*part)]) for part in parts)
        value, end = _DECODER.raw_decode(text, text.index("{"))
        if end <= len(head) + len(field) - same_len:
            raise ValueError("a part of the difference stands behind the object")
        return value


def _common_end(left: str, right: str) -> int:
    """How many characters at the end are the same."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands twice, and which one counts depends on the order")
    return members


def _number(written: str) -> tuple[str]:
    """A value that equals neither `true` nor a string."""
    return (written,)


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_int=_number, parse_float=_number)
