"""Where a known chunk may end in a prompt, at any alignment, without cutting the prompt.

The *ending* of a chunk is its last `ENDING_LEN` tokens. The filter holds hashes of the endings of all known chunks. A
weak rolling hash that picks candidates for a strong one is rsync's idea (Tridgell, "Efficient Algorithms for Sorting
and Synchronization", 1999, chapter 3); here the blocks are content-defined and the filter is one numpy gather.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_pic.core import token_loops
from sglang_pic.core.tokens import Tokens

EndingHashes = npt.NDArray[np.uint32]

# A filter has 16 to 64 slots for every ending added to it, of eight bits each: 2 to 6 positions in 100 meet a slot that
# is not empty, an eighth of them the right bit. Each of those costs a dictionary look-up.
_SLOTS_PER_ENDING = 16
_BIT = np.uint32(7)
_MIN_BITS = 10
_MAX_BITS = 28


def ending_hashes(tokens: Tokens) -> EndingHashes:
    """Hash `i` is that of `tokens[i : i + ENDING_LEN]`: `[max(0, len - ENDING_LEN + 1)]`. About .5 ns a token."""
    return token_loops.hash_endings(tokens)


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

    def add(self, endings: EndingHashes) -> int:
        """Add ending hashes; how many there was room for. For the rest `rebuild` is due first."""
        is_largest = len(self._slots) >= 1 << _MAX_BITS
        room = len(endings) if is_largest else max(0, -(-len(self._slots) // _SLOTS_PER_ENDING) - self._num_added)
        self._set(endings[:room])
        self._num_added += min(room, len(endings))
        return min(room, len(endings))

    def is_stale(self, num_endings: int) -> bool:
        """Whether more endings have been removed since the last rebuild than the `num_endings` that are left."""
        return self._num_added > 2 * num_endings + 64

    def rebuild(self, endings: npt.NDArray[np.uint32]) -> None:
        """Hold exactly `endings`, with room for as many again. Cost O(len(endings))."""
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
        # The bit is told by the other end of the hash.
        np.bitwise_or.at(self._slots, slots, np.left_shift(1, endings & _BIT).astype(np.uint8))
