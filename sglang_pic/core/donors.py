"""The donor table: which places of a trie hold a chunk of a given key.

Owns the lists of donors, flat arrays instead of an object each. A donor is a pointer (the segment of its last token,
start, length), never rows. Must not know how chunks are cut, nor compare tokens.
"""

from __future__ import annotations

from array import array

from sglang_pic.core.trie import Segment

__all__ = ["NONE", "DonorTable", "Heads"]

Heads = dict[int, int]
"""Chunk key to its freshest donor; one for each namespace."""

NONE = -1
"""Ends a list of donors inside the arrays."""

_NO_HEADS: Heads = {}


class DonorTable:
    """Donors by number; numbers are used again after a removal. Shrinks with `remove`, `remove_all`.

    Args:
        max_per_key: most donors of a key; the oldest one leaves for a new one.
    """

    def __init__(self, max_per_key: int) -> None:
        self._max_per_key = max_per_key
        self.segments: list[Segment | None] = []
        self.starts = array("i")
        self.lengths = array("i")
        self._next = array("i")
        self._keys: list[int] = []
        self._heads: list[Heads] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._keys) - len(self._free)

    @property
    def num_slots(self) -> int:
        """Donor numbers ever given out, free ones included."""
        return len(self._keys)

    def add(self, heads: Heads, key: int, segment: Segment, start: int, length: int) -> None:
        """Make a place the freshest donor of `key`; nothing happens where it is one already."""
        donors = self.of(heads, key)
        for donor in donors:
            if self.starts[donor] == start and self.segments[donor] is segment:
                return
        if len(donors) >= self._max_per_key:
            self.remove(donors[-1])
        donor = self._take_slot()
        self.segments[donor] = segment
        self.starts[donor] = start
        self.lengths[donor] = length
        self._next[donor] = heads.get(key, NONE)
        self._keys[donor] = key
        self._heads[donor] = heads
        heads[key] = donor
        segment.donors.append(donor)

    def of(self, heads: Heads, key: int) -> list[int]:
        """The donors of `key`, freshest first; at most `max_per_key`."""
        found = []
        donor = heads.get(key, NONE)
        while donor != NONE:
            found.append(donor)
            donor = self._next[donor]
        return found

    def end(self, donor: int) -> int:
        """The position after the donor's last token."""
        return self.starts[donor] + self.lengths[donor]

    def key(self, donor: int) -> int:
        """The chunk key that the donor was added under."""
        return self._keys[donor]

    def remove(self, donor: int) -> None:
        """Take out one donor. Cost O(donors of its segment)."""
        segment = self.segments[donor]
        assert segment is not None, "a donor is removed once"
        segment.donors.remove(donor)
        self._unlink(donor)

    def remove_all(self, segment: Segment) -> int:
        """Take out every donor of `segment`; returns how many there were."""
        num_donors = len(segment.donors)
        for donor in segment.donors:
            self._unlink(donor)
        segment.donors = []
        return num_donors

    def move_below(self, upper: Segment, lower: Segment) -> None:
        """After a split: donors that end below the cut belong to `lower`."""
        moved = [donor for donor in upper.donors if self.end(donor) > lower.start]
        upper.donors = [donor for donor in upper.donors if self.end(donor) <= lower.start]
        lower.donors = moved
        for donor in moved:
            self.segments[donor] = lower

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self.segments.append(None)
        self.starts.append(0)
        self.lengths.append(0)
        self._next.append(NONE)
        self._keys.append(0)
        self._heads.append(_NO_HEADS)
        return len(self._keys) - 1

    def _unlink(self, donor: int) -> None:
        heads, key, following = self._heads[donor], self._keys[donor], self._next[donor]
        before = heads[key]
        if before == donor:
            if following == NONE:
                del heads[key]
            else:
                heads[key] = following
        else:
            while self._next[before] != donor:
                before = self._next[before]
            self._next[before] = following
        self.segments[donor] = None
        self._keys[donor] = 0
        self._heads[donor] = _NO_HEADS
        self._free.append(donor)
