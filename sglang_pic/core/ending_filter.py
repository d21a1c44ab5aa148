"""A filter that finds the positions of a prompt where a known chunk may end, at any alignment.

The *ending* of a chunk is its last `ENDING_LEN` tokens; the filter has the hashes of all endings. As in rsync a weak
rolling hash picks candidates for a strong one (Tridgell, "Efficient Algorithms for Sorting and Synchronization", 1999,
chapter 3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_pic.core import token_loops
from sglang_pic.core.tokens import Tokens

EndingHashes = npt.NDArray[np.uint32]

# A filter has 16 to 64 slots of eight bits for every ending added to it: 2 to 6 % of positions find a slot that is not
# empty, an eighth of them a set bit. Each of those costs a dictionary look-up.
_SLOTS_PER_ENDING = 16
_BIT = np.uint32(7)
_MIN_BITS = 10
_MAX_BITS = 28


def ending_hashes(tokens: Tokens) -> EndingHashes:
    """Hash `i` is that of `tokens[i : i + ENDING_LEN]`: `[max(0, len - ENDING_LEN + 1)]`. About .5 ns a token."""
    return token_loops.hash_endings(tokens)


class EndingFilter:
    """A set of ending hashes with false positives and no false negatives.

    Grows by doubling. Removed endings stay until there are more of them than others (`is_stale`); the owner then calls
    `rebuild`.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._reset(0)

    @property
    def num_slots(self) -> int:
        """Size, in slots of one byte."""
        return len(self._slots)

    def add(self, endings: EndingHashes) -> int:
        """Add ending hashes; returns how many were added. The rest need a `rebuild` first."""
        is_largest = len(self._slots) >= 1 << _MAX_BITS
        room = len(endings) if is_largest else max(0, -(-len(self._slots) // _SLOTS_PER_ENDING) - self._num_added)
        self._set(endings[:room])
        self._num_added += min(room, len(endings))
        return min(room, len(endings))

    def is_stale(self, num_endings: int) -> bool:
        """Whether more endings have been removed since the last rebuild than the `num_endings` that are left."""
        return self._num_added > 2 * num_endings + 64

    def rebuild(self, endings: npt.NDArray[np.uint32]) -> None:
        """Replace the set by `endings`, with room for as many again. Cost O(len(endings))."""
        self._reset(len(endings))
        self._set(endings)
        self._num_added = len(endings)

    def candidates(self, hashes: EndingHashes) -> npt.NDArray[np.int64]:
        """Indices of the hashes that may be in the set, ascending."""
        return token_loops.find_set(hashes, self._slots, self._shift)

    def _reset(self, num_endings: int) -> None:
        wanted = (2 * num_endings * _SLOTS_PER_ENDING - 1).bit_length() if num_endings else 0
        bits = min(_MAX_BITS, max(_MIN_BITS, wanted))
        self._shift = 32 - bits
        self._slots = np.zeros(1 << bits, dtype=np.uint8)

    def _set(self, endings: EndingHashes) -> None:
        slots = (endings >> np.uint32(self._shift)).astype(np.int64)
        # The low bits of the hash choose the bit, the high ones the slot.
        np.bitwise_or.at(self._slots, slots, np.left_shift(1, endings & _BIT).astype(np.uint8))
