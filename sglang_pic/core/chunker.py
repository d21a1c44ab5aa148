"""Cuts token sequences by content, and names the pieces.

Owns where a chunk begins and ends. Must not know the index, nor any one model's template: the delimiter ids are given.

A chunk is cut by the FastCDC package over the tokens' 4-byte little-endian form. Its cuts are byte offsets; each is
rounded up to a token. The package refuses averages below 256 bytes (64 tokens), too coarse to find every repeat of 64
tokens, therefore each token is fed `_BYTES_AT_AVG / (4 * chunk_avg_tokens)` times in a row for smaller chunks: the
cuts still depend on nothing but the last few tokens and the previous cut.

Only what is published is cut. A prompt that is looked up is not: see `tails`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from fastcdc import fastcdc

from sglang_pic.core.config import CoreConfig

__all__ = ["Chunker", "Chunks", "HashFunction", "Tokens", "as_tokens", "require_tokens", "xxh3_name"]

Tokens = npt.NDArray[np.int32]
"""Token ids: int32, one-dimensional, contiguous, little-endian."""

HashFunction = Callable[[memoryview], int]
"""The name of a chunk from its bytes: an integer of 64 bits, not negative."""

_BYTES_AT_AVG = 256
_TOKEN_BYTES = 4
# How far before a position cutting begins when nothing better is known. FastCDC forgets where it began within a few
# chunks, so eight average chunks are enough to be in step with a cut from position 0.
_WARM_UP_CHUNKS = 8


def as_tokens(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """The ids as the core wants them; no copy if they are already so."""
    return np.ascontiguousarray(ids, dtype="<i4")


def require_tokens(tokens: Tokens) -> None:
    """Refuse arrays whose bytes are not those of `as_tokens`: their keys would never match."""
    if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"tokens: {tokens.dtype} of shape {tokens.shape}: must be 1-D contiguous int32; use as_tokens."
        )


def xxh3_name(data: memoryview) -> int:
    """The xxh3-64 of `data`: the name of a chunk inside its namespace."""
    return xxhash.xxh3_64_intdigest(data)


class Chunks(NamedTuple):
    """Chunks that tile `[start, ends[-1])`: chunk `i` is `[ends[i - 1], ends[i])`, the first begins at `start`."""

    start: int
    ends: list[int]

    def spans(self) -> list[tuple[int, int]]:
        """The chunks as half-open spans, in order."""
        return list(pairwise([self.start, *self.ends]))


class Chunker:
    """Cuts and hashes; stateless after construction, so equal inputs always give equal cuts.

    Args:
        config: the chunk sizes.
        hash_function: names a chunk; tests inject weak ones.
    """

    def __init__(self, config: CoreConfig, hash_function: HashFunction = xxh3_name) -> None:
        self._repeat = max(1, _BYTES_AT_AVG // (_TOKEN_BYTES * config.chunk_avg_tokens))
        self._unit = _TOKEN_BYTES * self._repeat
        self._min = config.chunk_min_tokens
        self._avg = config.chunk_avg_tokens
        self._max = config.chunk_max_tokens
        self._warm_up = _WARM_UP_CHUNKS * config.chunk_avg_tokens
        self._hash = hash_function

    def cut(
        self, tokens: Tokens, start: int = 0, end: int | None = None, *, delimiters: frozenset[int] = frozenset()
    ) -> Chunks:
        """Cuts `[start, end)` as if a chunk began at `start`. Cost O(end - start).

        Args:
            tokens: the whole sequence.
            start: where the first chunk begins.
            end: where the last one ends; the sequence's end if left out.
            delimiters: ids of the tokens that open or close a message. Cuts fall before and after each of them, and
                cutting begins afresh there, so that equal messages are cut equally wherever they stand.
        """
        stop = len(tokens) if end is None else end
        ends: list[int] = []
        at = start
        for delimiter in _delimiter_positions(tokens, start, stop, delimiters):
            if delimiter > at:
                self._cut_piece(tokens, at, delimiter, ends)
            ends.append(delimiter + 1)
            at = delimiter + 1
        if stop > at:
            self._cut_piece(tokens, at, stop, ends)
        return Chunks(start, ends)

    def sync_start(self, tokens: Tokens, position: int, delimiters: frozenset[int] = frozenset()) -> int:
        """Where to begin so that the cuts near and after `position` are those of a cut from 0.

        The last delimiter before `position` if one is near (then the cuts are the same), else far enough back for
        FastCDC to be in step again (then they nearly always are).
        """
        low = max(0, position - self._warm_up)
        near = _delimiter_positions(tokens, low, position, delimiters)
        return near[-1] if near else low

    def name(self, data: memoryview, start: int, end: int) -> int:
        """The name of chunk `[start, end)` of the tokens whose bytes are `data`."""
        return self._hash(data[_TOKEN_BYTES * start : _TOKEN_BYTES * end])

    def _cut_piece(self, tokens: Tokens, start: int, end: int, ends: list[int]) -> None:
        if end - start > self._min:
            piece = tokens[start:end] if self._repeat == 1 else np.repeat(tokens[start:end], self._repeat)
            unit = self._unit
            # Rounded up: offset -> first token boundary at or after it, as an absolute position.
            up = unit * start + unit - 1
            cuts = fastcdc(piece.data.cast("B"), self._min * unit, self._avg * unit, self._max * unit)
            ends.extend([(chunk.offset + chunk.length + up) // unit for chunk in cuts])
            if len(ends) > 1 and ends[-1] == ends[-2]:
                # The last two cuts fell into the last token.
                ends.pop()
        else:
            ends.append(end)


def _delimiter_positions(tokens: Tokens, start: int, end: int, delimiters: frozenset[int]) -> list[int]:
    if not delimiters or start >= end:
        return []
    window = tokens[start:end]
    is_delimiter = np.zeros(len(window), dtype=bool)
    # The order does not matter: the union is the same.
    for delimiter in delimiters:
        is_delimiter |= window == delimiter
    return (np.flatnonzero(is_delimiter) + start).tolist()
