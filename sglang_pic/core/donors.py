"""The donor table of a namespace: which places of its trie hold a known chunk, found by the chunk's tail.

Owns the lists of donors, flat arrays instead of an object each, and the filter that says where to look. A donor is a
pointer (the segment of its last token, start, length) with the chunk's name, never rows. Must not know how chunks are
cut, nor compare tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_pic.core.chunker import HashFunction, Tokens
from sglang_pic.core.ending_filter import TAIL_LEN, TailFilter, tail_hashes
from sglang_pic.core.trie import Segment

__all__ = ["NONE", "DonorTable", "TableSize"]

NONE = -1
"""Ends a list of donors inside the arrays."""

# Chunks with other names and the same tail share a list. In recorded sessions (ChatDev, OpenDevin, Moatless; SmolLM2's
# tokenizer) 82 to 90 in 100 tails have one name, 96 to 98 at most three, fewer than 1 in 100 more than eight. The bound
# is for text that ends in one repeated line: up to 5 tails in 10,000, with up to 2.5 % of all names.
_MAX_DONORS_PER_TAIL = 32

# Numbers kept for donors to come, beside twice as many as there are donors.
_MIN_FREE = 64

_TOKEN_BYTES = 4


@dataclass(slots=True)
class TableSize:
    """What all tables of an index hold together, kept up to date by each of them."""

    num_donors: int = 0
    num_tails: int = 0
    num_filter_slots: int = 0


class DonorTable:
    """Donors by number; numbers are used again after a removal. Shrinks with `remove_all`.

    Args:
        max_per_name: most donors of chunks with one name; the oldest one leaves for a new one.
        hash_function: names chunks.
        size: updated with every change.
    """

    def __init__(self, max_per_name: int, hash_function: HashFunction, size: TableSize) -> None:
        self.max_per_name = max_per_name
        self._hash = hash_function
        self._size = size
        self._filter = TailFilter()
        size.num_filter_slots += self._filter.num_slots
        self.heads: dict[int, int] = {}
        self.segments: list[Segment | None] = []
        self.starts = array("i")
        self.lengths = array("i")
        self.names = array("Q")
        self.tails = array("I")
        self._next = array("i")
        # Where in its segment's list a donor stands.
        self._places = array("i")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.segments) - len(self._free)

    @property
    def num_filter_slots(self) -> int:
        """Size of the filter, in slots of one byte."""
        return self._filter.num_slots

    def add(self, tail: int, name: int, segment: Segment, start: int, length: int) -> None:
        """Make a place the freshest donor of its chunk; nothing happens where it is one."""
        if tail in self.heads:
            donors = self.of(tail)
            same = [donor for donor in donors if self.names[donor] == name]
            if any(self.starts[donor] == start and self.segments[donor] is segment for donor in same):
                return
            if len(same) >= self.max_per_name:
                self.remove(same[-1])
            elif len(donors) >= _MAX_DONORS_PER_TAIL:
                self.remove(donors[-1])
        head = self.heads.get(tail, NONE)
        if head == NONE:
            self._admit(tail)
        donor = self._take_slot()
        self.segments[donor] = segment
        self.starts[donor] = start
        self.lengths[donor] = length
        self.names[donor] = name
        self.tails[donor] = tail
        self._next[donor] = head
        self.heads[tail] = donor
        self._places[donor] = len(segment.donors)
        segment.donors.append(donor)
        self._size.num_donors += 1

    def scan(self, tokens: Tokens, start: int, end: int) -> tuple[list[int], list[int]]:
        """Where in `(start, end]` a known chunk may end, ascending, and the tail hash of each place.

        Few of the places lead to nothing: their tail is not among `heads`. Cost O(end - start) in numpy.
        """
        first = max(0, start + 1 - TAIL_LEN)
        hashes = tail_hashes(tokens[first:end])
        places = self._filter.candidates(hashes)
        return (places + (first + TAIL_LEN)).tolist(), hashes[places].tolist()

    def ending_at(self, tail: int, data: memoryview, end: int) -> tuple[list[int], int]:
        """The donors whose chunk ends at `end` of the tokens whose bytes are `data`, freshest first, by name.

        Also how many spans were named to find out.
        """
        found = []
        names: dict[int, int] = {}
        for donor in self.of(tail):
            length = self.lengths[donor]
            if length <= end:
                name = names.get(length)
                if name is None:
                    name = names[length] = self._hash(data[_TOKEN_BYTES * (end - length) : _TOKEN_BYTES * end])
                if name == self.names[donor]:
                    found.append(donor)
        return found, len(names)

    def of(self, tail: int) -> list[int]:
        """All donors of a tail, freshest first."""
        found = []
        donor = self.heads.get(tail, NONE)
        while donor != NONE:
            found.append(donor)
            donor = self._next[donor]
        return found

    def end(self, donor: int) -> int:
        """The position after the donor's last token."""
        return self.starts[donor] + self.lengths[donor]

    def remove(self, donor: int) -> None:
        """Take out one donor. Cost O(1), as lists are bounded."""
        segment = self.segments[donor]
        assert segment is not None, "a donor is removed once"
        # The last one takes its place: the order inside a segment means nothing.
        last = segment.donors.pop()
        if last != donor:
            segment.donors[self._places[donor]] = last
            self._places[last] = self._places[donor]
        self._unlink(donor)

    def remove_all(self, segment: Segment) -> None:
        """Take out every donor of `segment`; other donors may get other numbers."""
        for donor in segment.donors:
            self._unlink(donor)
        segment.donors = []
        if len(self._free) > 2 * len(self) + _MIN_FREE:
            self._compact()

    def move_below(self, upper: Segment, lower: Segment) -> None:
        """After a split: donors that end below the cut belong to `lower`."""
        kept: list[int] = []
        moved: list[int] = []
        for donor in upper.donors:
            stays = self.end(donor) <= lower.start
            donors = kept if stays else moved
            self.segments[donor] = upper if stays else lower
            self._places[donor] = len(donors)
            donors.append(donor)
        upper.donors, lower.donors = kept, moved

    def close(self) -> None:
        """The table goes with its namespace: nothing is in it, only its filter counts."""
        assert not self.heads, "a table is closed when it is empty"
        self._size.num_filter_slots -= self._filter.num_slots

    def passes_filter(self, tail: int) -> bool:
        """Whether `scan` would see the tail; for the invariants."""
        return bool(len(self._filter.candidates(np.array([tail], dtype=np.uint32))))

    def is_named(self, donor: int, chunk: Tokens) -> bool:
        """Whether the donor has the name of `chunk`; for the invariants."""
        return self._hash(chunk.data.cast("B")) == self.names[donor]

    def _admit(self, tail: int) -> None:
        if not self._filter.add(tail):
            self._rebuild_filter()
            added = self._filter.add(tail)
            assert added, "a filter has room after it was rebuilt"
        self._size.num_tails += 1

    def _rebuild_filter(self) -> None:
        before = self._filter.num_slots
        self._filter.rebuild(np.fromiter(self.heads, dtype=np.uint32, count=len(self.heads)))
        self._size.num_filter_slots += self._filter.num_slots - before

    def _compact(self) -> None:
        """Give back the memory of the free numbers. Cost O(all numbers), after most of them were freed."""
        live = np.array([donor for donor, segment in enumerate(self.segments) if segment is not None], dtype=np.int64)
        # The last entry stands for NONE, which is -1.
        numbers = np.full(len(self.segments) + 1, NONE, dtype=np.int32)
        numbers[live] = np.arange(len(live), dtype=np.int32)
        self.segments = [self.segments[donor] for donor in live.tolist()]
        for segment in dict.fromkeys(self.segments):
            assert segment is not None
            segment.donors = numbers[segment.donors].tolist()
        heads = list(zip(self.heads, numbers[list(self.heads.values())].tolist(), strict=True))
        # In place: the planner holds on to it while it forgets.
        self.heads.clear()
        self.heads.update(heads)
        self._next = _take(self._next, live)
        self._next = array("i", numbers[self._next].tobytes())
        self.starts, self.lengths, self.names, self.tails, self._places = (
            _take(column, live) for column in (self.starts, self.lengths, self.names, self.tails, self._places)
        )
        self._free = []

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self.segments.append(None)
        self.starts.append(0)
        self.lengths.append(0)
        self.names.append(0)
        self.tails.append(0)
        self._next.append(NONE)
        self._places.append(0)
        return len(self.segments) - 1

    def _unlink(self, donor: int) -> None:
        tail, following = self.tails[donor], self._next[donor]
        before = self.heads[tail]
        if before == donor:
            if following == NONE:
                del self.heads[tail]
                self._size.num_tails -= 1
                if self._filter.is_stale(len(self.heads)):
                    self._rebuild_filter()
            else:
                self.heads[tail] = following
        else:
            while self._next[before] != donor:
                before = self._next[before]
            self._next[before] = following
        self.segments[donor] = None
        self._free.append(donor)
        self._size.num_donors -= 1


def _take(column: array[int], rows: npt.NDArray[np.int64]) -> array[int]:
    return array(column.typecode, np.frombuffer(column, dtype=column.typecode)[rows].tobytes())
