"""Stretches of text that are tokenised once, and found again in every later call."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids: one-dimensional, contiguous, little-endian int32."""

MAX_CACHED_BYTES: Final = 1 << 29
"""Host memory of a cache."""

# Of a stretch, beside its text and the bytes of its arrays: their objects, its own, and its place in the dictionary.
# Measured on stretches of 4 to 400 tokens with tracemalloc.
_STRETCH_BYTES = 352


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A stretch of text and its tokens."""

    text: str
    ids: Tokens
    starts: Tokens
    """`starts[i]`: the first character of `text` that begins in token i or later. Non-decreasing, as long as `ids`.
    A character that takes several tokens belongs to the first of them."""

    @property
    def num_bytes(self) -> int:
        """Host memory, with its place in a cache."""
        return sys.getsizeof(self.text) + self.ids.nbytes + self.starts.nbytes + _STRETCH_BYTES


class TokenizedCache:
    """What was tokenised, by its text; the least recently used ones go when all together pass `max_bytes`."""

    def __init__(self, make: Callable[[str], TokenizedText], max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._make = make
        self._max_bytes = max_bytes
        self._stretches: OrderedDict[str, TokenizedText] = OrderedDict()
        self.num_bytes = 0

    def get(self, text: str) -> TokenizedText:
        """The stretch of a text, made anew or kept from before."""
        stretch = self._stretches.get(text)
        if stretch is not None:
            self._stretches.move_to_end(text)
            return stretch
        stretch = self._make(text)
        self._stretches[text] = stretch
        self.num_bytes += stretch.num_bytes
        while self.num_bytes > self._max_bytes and len(self._stretches) > 1:
            _, oldest = self._stretches.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        return stretch
