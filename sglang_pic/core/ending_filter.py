"""A filter that finds the positions of a prompt where a known chunk may end, at any alignment.

The *ending* of a chunk is its last `ENDING_LEN` tokens; the filter has the hashes of all endings. As in rsync a weak
rolling hash picks candidates for a strong one (Tridgell, "Efficient Algorithms for Sorting and Synchronization", 1999,
chapter 3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_pic.core import token_loops
from sglang_pic.core.token_loops import Hashes

# A filter has 16 to 48 slots of eight bits for every ending added to it: 2 to 6 % of positions find a slot that is not
# empty, an eighth of them a set bit. Each of those costs a dictionary look-up.
_SLOTS_PER_ENDING = 16
_BIT = np.uint32(7)
_MIN_BITS = 10
_MAX_BITS = 28


class EndingFilter:
    """A set of ending hashes with false positives and no false negatives.

    Grows by doubling. Removed endings stay until there are more of them than others (`is_stale`); the owner then calls
    `rebuild`.
    """

    def __init__(self) -> None:
        self.rebuild(np.empty(0, np.uint32))

    @property
    def num_slots(self) -> int:
        """Size, in slots of one byte."""
        return len(self._slots)

    def add(self, endings: Hashes) -> bool:
        """Add ending hashes; False, and none is added, if there is no room: then the owner calls `rebuild`."""
        self._num_added += len(endings)
        has_room = self._num_added * _SLOTS_PER_ENDING <= len(self._slots) or len(self._slots) == 1 << _MAX_BITS
        if has_room:
            self._set(endings)
        return has_room

    def is_stale(self, num_endings: int) -> bool:
        """Whether more endings have been removed since the last rebuild than the `num_endings` that are left."""
        return self._num_added > 2 * num_endings + 64

    def rebuild(self, endings: Hashes) -> None:
        """Replace the set by `endings`, with room for half as many again. Cost O(len(endings))."""
        wanted = (len(endings) * _SLOTS_PER_ENDING * 3 // 2 - 1).bit_length()
        bits = min(_MAX_BITS, max(_MIN_BITS, wanted))
        self._shift, self._slots = 32 - bits, np.zeros(1 << bits, dtype=np.uint8)
        self._num_added = len(endings)
        self._set(endings)

    def candidates(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Indices of the hashes that may be in the set, ascending."""
        return token_loops.find_set(hashes, self._slots, self._shift)

    def _set(self, endings: Hashes) -> None:
        slots = (endings >> np.uint32(self._shift)).astype(np.int64)
        # The low bits of the hash choose the bit, the high ones the slot.
        np.bitwise_or.at(self._slots, slots, np.left_shift(1, endings & _BIT).astype(np.uint8))
