"""How much a search at every alignment would find: the upper bound beside which the census stands.

Owns the windows seen so far, by a rolling hash. Must not know chunks, runs or files.

A token counts if it lies in a window of `WINDOW_LEN` tokens that an earlier call had too, anywhere. Equal windows have
equal hashes; unequal ones collide with a chance of about 2^-64 for a pair, and nobody is served by this.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pic_traces.encode.encoded import Tokens

__all__ = ["WINDOW_LEN", "Repeated", "WindowSearch"]

WINDOW_LEN = 64

_Hashes: TypeAlias = npt.NDArray[np.uint64]

_BASE = 0x5851F42D4C957F2D
"""Odd, so that it has an inverse modulo 2^64."""
_BLOCK = 1 << 16
"""Windows hashed at once."""


class Repeated(NamedTuple):
    """Tokens of a prompt outside its prefix that lie in windows seen before."""

    num: int = 0
    """In any such window, also one that begins in the prefix."""
    num_behind: int = 0
    """In such windows wholly behind the prefix."""

    def plus(self, other: Repeated) -> Repeated:
        """The sums."""
        return Repeated(self.num + other.num, self.num_behind + other.num_behind)


class WindowSearch:
    """The windows of all calls so far. Memory: 8 bytes a distinct window, at most four times that while merging."""

    def __init__(self) -> None:
        # Ascending, distinct, disjoint; each at least twice as long as the next, so that there are few of them.
        self._seen: list[_Hashes] = []

    def observe(self, path: Tokens, *, prompt_len: int, prefix_len: int) -> Repeated:
        """Count the tokens of `path[prefix_len:prompt_len]` that lie in a window seen before; then remember the path.

        Args:
            path: prompt and answer.
            prompt_len: windows of the prompt are looked up, those of the answer are only remembered.
            prefix_len: `path[:prefix_len]` begins an earlier path, so its windows are known. Windows that reach over
                its end are looked up.
        """
        start = max(0, prefix_len - WINDOW_LEN + 1)
        found = []
        fresh = []
        for at, hashes in _blocks(path[start:]):
            first = start + at
            is_known = self._is_known(hashes)
            found.append(np.flatnonzero(is_known[: max(0, prompt_len - WINDOW_LEN + 1 - first)]) + first)
            fresh.append(hashes[~is_known])
        if fresh:
            self._remember(np.unique(np.concatenate(fresh)))
        starts = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        behind = starts[np.searchsorted(starts, prefix_len) :]
        return Repeated(_union_len(starts, prefix_len), _union_len(behind, prefix_len))

    def _is_known(self, hashes: _Hashes) -> npt.NDArray[np.bool_]:
        order = np.argsort(hashes)
        # Ascending queries walk through the long arrays instead of jumping about in them.
        queries = hashes[order]
        known = np.zeros(len(queries), dtype=np.bool_)
        for seen in self._seen:
            at = np.minimum(np.searchsorted(seen, queries), len(seen) - 1)
            known |= seen[at] == queries
        result = np.empty_like(known)
        result[order] = known
        return result

    def _remember(self, fresh: _Hashes) -> None:
        if not len(fresh):
            return
        while self._seen and len(self._seen[-1]) < 2 * len(fresh):
            fresh = np.concatenate([self._seen.pop(), fresh])
            fresh.sort()
        self._seen.append(fresh)


def _union_len(starts: npt.NDArray[np.int64], floor: int) -> int:
    """Tokens from `floor` on in the windows that begin at `starts` (ascending)."""
    if not len(starts):
        return 0
    ends = starts + WINDOW_LEN
    # Each window adds what the one before it has not reached.
    reached = np.maximum(np.concatenate([[floor], ends[:-1]]), floor)
    return int(np.maximum(ends - np.maximum(starts, reached), 0).sum())


def _blocks(tokens: Tokens) -> Iterator[tuple[int, _Hashes]]:
    """Where each block of windows begins, and the hashes of its windows, one for every alignment."""
    powers, inverses = _powers()
    for at in range(0, len(tokens) - WINDOW_LEN + 1, _BLOCK):
        block = tokens[at : at + _BLOCK + WINDOW_LEN - 1]
        num_windows = len(block) - WINDOW_LEN + 1
        sums = np.zeros(len(block) + 1, dtype=np.uint64)
        np.cumsum(_mix(block) * powers[: len(block)], out=sums[1:])
        # sum(token[i + k] * base^(i + k)) * base^-i does not depend on i any more.
        yield at, (sums[WINDOW_LEN:] - sums[:num_windows]) * inverses[:num_windows]


@cache
def _powers() -> tuple[_Hashes, _Hashes]:
    return _geometric(_BASE, _BLOCK + WINDOW_LEN), _geometric(pow(_BASE, -1, 1 << 64), _BLOCK + WINDOW_LEN)


def _geometric(base: int, num: int) -> _Hashes:
    factors = np.full(num, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def _mix(tokens: Tokens) -> _Hashes:
    """Token ids spread over 64 bits: their own are few, and sums of small numbers would meet."""
    mixed = tokens.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
