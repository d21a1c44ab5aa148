"""Rolling hashes: where a known chunk may end in a prompt, at any alignment, without cutting the prompt.

Owns the hash of the `TAIL_LEN` tokens before a position, and the filter over the tails of all known chunks. A weak
rolling hash that picks candidates for a strong one is rsync's idea (Tridgell, "Efficient Algorithms for Sorting and
Synchronization", 1999, chapter 3); here the blocks are content-defined and the filter is one numpy gather. Must not
know donors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_pic.core.chunker import Tokens

__all__ = ["TAIL_LEN", "TailFilter", "TailHashes", "tail_hashes"]

TAIL_LEN = 8
"""Tokens that a tail hash covers; no chunk that is looked up is shorter."""

TailHashes = npt.NDArray[np.uint32]

# The five primes of xxHash32: odd, so that multiplication loses nothing, with bits well spread.
_TOKEN, _STEP_1, _STEP_2, _STEP_4, _FINAL = map(np.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))
_SHIFT_TOKEN, _SHIFT_FINAL = np.uint32(15), np.uint32(16)

# A filter has 16 to 64 slots for every tail added to it: 2 to 6 positions in 100 pass by chance and cost a dictionary
# look-up each, which takes as long as the gather itself.
_SLOTS_PER_TAIL = 16
_MIN_BITS = 10
_MAX_BITS = 28


def tail_hashes(tokens: Tokens) -> TailHashes:
    """Hash `i` is that of `tokens[i : i + TAIL_LEN]`: `[max(0, len - TAIL_LEN + 1)]`. About 2 ns a token."""
    if len(tokens) < TAIL_LEN:
        return np.empty(0, dtype=np.uint32)
    # Doubling: spans of 2, 4 and 8 tokens from two of half the length.
    hashes: TailHashes = tokens.view(np.uint32) * _TOKEN
    hashes ^= hashes >> _SHIFT_TOKEN
    hashes = hashes[:-1] * _STEP_1 + hashes[1:]
    hashes = hashes[:-2] * _STEP_2 + hashes[2:]
    hashes = hashes[:-4] * _STEP_4 + hashes[4:]
    hashes *= _FINAL
    hashes ^= hashes >> _SHIFT_FINAL
    return hashes


class TailFilter:
    """A set of tail hashes that may answer yes by chance, never no by mistake.

    Grows by doubling. A removed tail stays in it until more have been removed than are left; whoever owns the tails
    then calls `rebuild`.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._reset(0)

    @property
    def num_slots(self) -> int:
        """Size, in slots of one byte."""
        return len(self._slots)

    def add(self, tail: int) -> bool:
        """Add one tail hash; False where the filter is full, and `rebuild` is due first."""
        if self._num_added * _SLOTS_PER_TAIL >= len(self._slots) and len(self._slots) < 1 << _MAX_BITS:
            return False
        self._slots[tail >> self._shift] = True
        self._num_added += 1
        return True

    def is_stale(self, num_tails: int) -> bool:
        """Whether more tails have been removed since the last rebuild than the `num_tails` that are left."""
        return self._num_added > 2 * num_tails + 64

    def rebuild(self, tails: npt.NDArray[np.uint32]) -> None:
        """Hold exactly `tails`, with room for as many again. Cost O(len(tails))."""
        self._reset(len(tails))
        self._slots[(tails >> np.uint32(self._shift)).astype(np.int64)] = True
        self._num_added = len(tails)

    def candidates(self, hashes: TailHashes) -> npt.NDArray[np.int64]:
        """Indices of the hashes that may be in the set, ascending."""
        indices = (hashes >> np.uint32(self._shift)).astype(np.int64)
        return np.flatnonzero(self._slots.take(indices))

    def _reset(self, num_tails: int) -> None:
        bits = min(_MAX_BITS, max(_MIN_BITS, (2 * num_tails * _SLOTS_PER_TAIL - 1).bit_length() if num_tails else 0))
        self._shift = 32 - bits
        self._slots = np.zeros(1 << bits, dtype=bool)
