"""Cuts token sequences into chunks by content, and hashes the chunks.

FastCDC cuts the tokens' 4-byte little-endian form; its byte offsets are rounded up to tokens. The package refuses
averages below 256 bytes (64 tokens), too coarse to find every repeat of 64 tokens. For smaller chunks each token is
fed `_BYTES_AT_AVG / (4 * chunk_avg_tokens)` times in a row; cuts still depend on the last few tokens and the previous
cut alone.

Only published tokens are cut; a prompt is scanned for the endings of known chunks (`ending_filter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter

import numpy as np
import xxhash
from fastcdc import fastcdc

from sglang_pic.core.core_config import CoreConfig
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens

HashFunction = Callable[[memoryview], int]
"""The name of a chunk from its bytes: an integer of 64 bits, not negative."""

_BYTES_AT_AVG = 256
# Cutting begins so far before a position that has no delimiter near. FastCDC forgets where it began within a few
# chunks, so after eight average chunks its cuts are those of a cut from position 0.
_WARM_UP_CHUNKS = 8
_LENGTH = attrgetter("length")


xxh3_name: HashFunction = xxhash.xxh3_64_intdigest
"""The xxh3-64 of some bytes: the name of a chunk inside its namespace."""


class Chunker:
    """Cuts and hashes; stateless after construction, so equal inputs always give equal cuts.

    Args:
        config: the chunk sizes.
        hash_function: names a chunk; tests inject weak ones.
    """

    def __init__(self, config: CoreConfig, hash_function: HashFunction = xxh3_name) -> None:
        self._config = config
        self._repeat = max(1, _BYTES_AT_AVG // (TOKEN_BYTES * config.chunk_avg_tokens))
        self._hash = hash_function

    def cut(
        self, tokens: Tokens, start: int = 0, end: int | None = None, *, delimiters: frozenset[int] = frozenset()
    ) -> list[int]:
        """The ends of the chunks that tile `[start, end)`, ascending. Cost O(end - start).

        Args:
            tokens: the whole sequence.
            start: where the first chunk begins.
            end: where the last one ends; the sequence's end if left out.
            delimiters: ids of the tokens that open or close a message. Cutting restarts before and after each, so
                equal messages are cut equally at any position.
        """
        stop = len(tokens) if end is None else end
        data = np.repeat(tokens[start:stop], self._repeat).data.cast("B")
        ends: list[int] = []
        at = start
        for delimiter in _delimiter_positions(tokens, start, stop, delimiters):
            if delimiter > at:
                self._cut_piece(data, start, at, delimiter, ends)
            ends.append(delimiter + 1)
            at = delimiter + 1
        if stop > at:
            self._cut_piece(data, start, at, stop, ends)
        return ends

    def sync_start(self, tokens: Tokens, position: int, delimiters: frozenset[int] = frozenset()) -> int:
        """Where to begin cutting so that the cuts near and after `position` are those of a cut from 0.

        The last delimiter before `position` if one is near (the cuts are the same); else eight average chunks earlier
        (they nearly always are).
        """
        low = max(0, position - _WARM_UP_CHUNKS * self._config.chunk_avg_tokens)
        near = _delimiter_positions(tokens, low, position, delimiters)
        return near[-1] if near else low

    def names(self, tokens: Tokens, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
        """The names of the chunks that begin at `starts` and end at `ends`."""
        data, named = tokens.data.cast("B"), self._hash
        return [named(data[TOKEN_BYTES * start : TOKEN_BYTES * end]) for start, end in zip(starts, ends, strict=True)]

    def _cut_piece(self, data: memoryview, first: int, start: int, end: int, ends: list[int]) -> None:
        """Append the ends of the chunks of `[start, end)`; `data` has the repeated tokens from `first` on."""
        config, unit = self._config, TOKEN_BYTES * self._repeat
        if end - start <= config.chunk_min_tokens:
            ends.append(end)
            return
        piece = data[unit * (start - first) : unit * (end - first)]
        sizes = (config.chunk_min_tokens * unit, config.chunk_avg_tokens * unit, config.chunk_max_tokens * unit)
        # Rounded up: offset -> first token boundary at or after it, as an absolute position.
        offsets = accumulate(map(_LENGTH, fastcdc(piece, *sizes)), initial=unit * start + unit - 1)
        next(offsets)
        ends.extend([offset // unit for offset in offsets])
        if len(ends) > 1 and ends[-1] == ends[-2]:
            # The last two cuts fell into the last token.
            ends.pop()


def _delimiter_positions(tokens: Tokens, start: int, end: int, delimiters: frozenset[int]) -> list[int]:
    if not delimiters:
        return []
    part = tokens[start:end]
    # Several times faster than `numpy.isin` for the few that a template has.
    found = np.zeros(len(part), dtype=np.bool_)
    for delimiter in delimiters:
        found |= part == delimiter
    return (np.flatnonzero(found) + start).tolist()
