"""Where a known chunk may end in a prompt, at any alignment, without cutting the prompt.

The *ending* of a chunk is its last `ENDING_LEN` tokens. The filter holds hashes of the endings of all known chunks. A
weak rolling hash that picks candidates for a strong one is rsync's idea (Tridgell, "Efficient Algorithms for Sorting
and Synchronization", 1999, chapter 3); here the blocks are content-defined and the filter is one numpy gather.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_pic.core.native import compiled
from sglang_pic.core.tokens import Tokens

ENDING_LEN = 8
"""No chunk that is looked up is shorter."""

EndingHashes = npt.NDArray[np.uint32]

# The five primes of xxHash32: odd, so that multiplication loses nothing, with bits well spread.
_TOKEN, _STEP_1, _STEP_2, _STEP_4, _FINAL = map(np.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))
_SHIFT_TOKEN, _SHIFT_FINAL = np.uint32(15), np.uint32(16)

# A filter has 16 to 64 slots for every ending added to it, of eight bits each: 2 to 6 positions in 100 meet a slot that
# is not empty, an eighth of them the right bit. Each of those costs a dictionary look-up.
_SLOTS_PER_ENDING = 16
_BIT = 7
_MIN_BITS = 10
_MAX_BITS = 28


def ending_hashes(tokens: Tokens) -> EndingHashes:
    """Hash `i` is that of `tokens[i : i + ENDING_LEN]`: `[max(0, len - ENDING_LEN + 1)]`. About .5 ns a token."""
    return np.frombuffer(hash_endings(tokens), dtype=np.uint32)


@compiled
def hash_endings(tokens: Tokens) -> bytes:
    """The bytes of `ending_hashes`."""
    if len(tokens) < ENDING_LEN:
        return b""
    # Doubling: spans of 2, 4 and 8 tokens from two of half the length.
    hashes: EndingHashes = tokens.view(np.uint32) * _TOKEN
    hashes ^= hashes >> _SHIFT_TOKEN
    hashes = hashes[:-1] * _STEP_1 + hashes[1:]
    hashes = hashes[:-2] * _STEP_2 + hashes[2:]
    hashes = hashes[:-4] * _STEP_4 + hashes[4:]
    hashes *= _FINAL
    hashes ^= hashes >> _SHIFT_FINAL
    return hashes.tobytes()


@compiled
def find_set(hashes: EndingHashes, slots: npt.NDArray[np.uint8], shift: int) -> bytes:
    """The indices of the hashes whose bit is set in the slots of a filter, ascending, in int64. About 2 ns a hash."""
    met = slots.take((hashes >> np.uint32(shift)).astype(np.int64))
    places = np.flatnonzero(met != 0)
    return places[met[places] & _bits(hashes[places]) != 0].tobytes()


class EndingFilter:
    """A set of ending hashes that may answer yes by chance, never no by mistake.

    Grows by doubling. A removed ending stays in it until more have been removed than are left; whoever owns the endings
    then calls `rebuild`.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._reset(0)

    @property
    def num_slots(self) -> int:
        """Size, in slots of one byte."""
        return len(self._slots)

    def add(self, ending: int) -> bool:
        """Add one ending hash; False where the filter is full, and `rebuild` is due first."""
        if self._num_added * _SLOTS_PER_ENDING >= len(self._slots) and len(self._slots) < 1 << _MAX_BITS:
            return False
        self._slots[ending >> self._shift] |= 1 << (ending & _BIT)
        self._num_added += 1
        return True

    def is_stale(self, num_endings: int) -> bool:
        """Whether more endings have been removed since the last rebuild than the `num_endings` that are left."""
        return self._num_added > 2 * num_endings + 64

    def rebuild(self, endings: npt.NDArray[np.uint32]) -> None:
        """Hold exactly `endings`, with room for as many again. Cost O(len(endings))."""
        self._reset(len(endings))
        slots = (endings >> np.uint32(self._shift)).astype(np.int64)
        np.bitwise_or.at(self._slots, slots, _bits(endings))
        self._num_added = len(endings)

    def candidates(self, hashes: EndingHashes) -> npt.NDArray[np.int64]:
        """Indices of the hashes that may be in the set, ascending."""
        return np.frombuffer(find_set(hashes, self._slots, self._shift), dtype=np.int64)

    def _reset(self, num_endings: int) -> None:
        wanted = (2 * num_endings * _SLOTS_PER_ENDING - 1).bit_length() if num_endings else 0
        bits = min(_MAX_BITS, max(_MIN_BITS, wanted))
        self._shift = 32 - bits
        self._slots = np.zeros(1 << bits, dtype=np.uint8)


def _bits(hashes: EndingHashes) -> npt.NDArray[np.uint8]:
    """The bit of each hash in its slot; the slot is told by the other end of the hash."""
    return np.left_shift(1, hashes & np.uint32(_BIT)).astype(np.uint8)
