"""The donor table of a namespace: the places of known chunks in its trie, found by a chunk's ending.

A donor is a pointer (the node of its last token, start, length) with the chunk's hash, never rows. Donors are numbers
into flat arrays instead of objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sglang_pic.core import token_loops
from sglang_pic.core.chunker import HashFunction
from sglang_pic.core.ending_filter import EndingFilter
from sglang_pic.core.token_loops import ENDING_LEN, Hashes
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens
from sglang_pic.core.trie import Node

NONE = -1
"""Ends a list of donors inside the arrays."""

# Chunks with other names and the same ending share a list. In recorded sessions (ChatDev, OpenDevin, Moatless; with
# SmolLM2's tokenizer) 82 to 90 in 100 endings have one name, 96 to 98 at most three, fewer than 1 in 100 more than
# eight. The bound is for text that ends in one repeated line: up to 5 endings in 10,000, with up to 2.5 % of all names.
MAX_DONORS_PER_ENDING = 32

# Free numbers that are kept, beside twice as many as there are donors.
_MIN_FREE = 64


@dataclass(slots=True)
class TableSize:
    """The sizes of all tables of an index together; every table updates them."""

    num_donors: int = 0
    num_endings: int = 0
    num_filter_slots: int = 0


class DonorTable:
    """Donors by number; numbers are reused after a removal. Shrinks with `remove_all`.

    Args:
        max_per_name: most donors of chunks with one name; a new one evicts the oldest, pinned ones last.
        hash_function: names chunks.
        size: updated with every change.
    """

    def __init__(self, max_per_name: int, hash_function: HashFunction, size: TableSize) -> None:
        self.max_per_name = max_per_name
        self.hash_function = hash_function
        self._size = size
        self.filter = EndingFilter()
        size.num_filter_slots += self.filter.num_slots
        self.heads: dict[int, int] = {}
        self.nodes: list[Node | None] = []
        self.starts, self.lengths, self.names, self.endings = array("i"), array("i"), array("Q"), array("I")
        # The next donor of the same ending, and a donor's index in its node's list.
        self._next, self._places = array("i"), array("i")
        self._columns = (self.starts, self.lengths, self.names, self.endings, self._next, self._places)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.nodes) - len(self._free)

    def add(self, ending: int, name: int, node: Node, start: int, length: int) -> None:
        """Make `[start, start + length)` of the path to `node` the freshest donor of its chunk, unless it is one."""
        donors = self.of(ending)
        same = [donor for donor in donors if self.names[donor] == name]
        if any(self.starts[donor] == start and self.nodes[donor] is node for donor in same):
            return
        if len(same) >= self.max_per_name:
            self.remove(self._least_wanted(same))
        elif len(donors) >= MAX_DONORS_PER_ENDING:
            self.remove(self._least_wanted(donors))
        head = self.heads.get(ending, NONE)
        (donor,) = self._take_slots(1)
        if head == NONE:
            self._admit(np.array([ending], np.uint32), [donor])
        self.starts[donor], self.lengths[donor], self.names[donor] = start, length, name
        self.endings[donor], self._next[donor], self.heads[ending] = ending, head, donor
        self._hold(node, [donor])
        self._size.num_donors += 1

    def add_all(
        self,
        path: Sequence[Node],
        starts: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int32],
        names: Sequence[int],
        endings: Hashes,
    ) -> None:
        """As `add`, one after the other, for places `[start, end)` of a path, ascending."""
        if not names:
            return
        holders = np.array([node.end for node in path[:-1]], np.int64).searchsorted(ends)
        hashes, lengths = endings.tolist(), ends - starts
        # Donors whose ending is new and unique here are added together.
        first = dict(zip(reversed(hashes), range(len(hashes) - 1, -1, -1), strict=True))
        is_new = np.array([first[each] == i and each not in self.heads for i, each in enumerate(hashes)], np.bool_)
        numbers = self._take_slots(int(np.count_nonzero(is_new)))
        nodes = holders[is_new]
        for column, values in (
            (self.starts, starts),
            (self.lengths, lengths),
            (self.names, np.array(names, np.uint64)),
            (self.endings, endings),
            (self._next, np.full(len(hashes), NONE, np.int32)),
        ):
            np.frombuffer(column, column.typecode)[numbers] = values[is_new]
        bounds = [*np.flatnonzero(np.diff(nodes, prepend=-1)).tolist(), len(numbers)]
        for begin, stop in pairwise(bounds):
            self._hold(path[nodes[begin]], numbers[begin:stop])
        self._admit(endings[is_new], numbers)
        self._size.num_donors += len(numbers)
        for i in np.flatnonzero(~is_new).tolist():
            self.add(hashes[i], names[i], path[holders[i]], int(starts[i]), int(lengths[i]))

    def scan(self, tokens: Tokens, start: int, end: int) -> tuple[memoryview, memoryview]:
        """The places in `(start, end]` where a known chunk may end, ascending, and the ending hash of each.

        A few places are false positives: their ending is not in `heads`. Cost O(end - start). Not lists, because most
        places lie inside a run and are skipped.
        """
        first = max(0, start + 1 - ENDING_LEN)
        hashes = token_loops.hash_endings(tokens[first:end])
        places = self.filter.candidates(hashes)
        return (places + (first + ENDING_LEN)).data, hashes[places].data

    def ending_at(self, ending: int, data: memoryview, end: int) -> tuple[list[int], int]:
        """The donors whose chunk ends at `end` of the prompt with bytes `data`, freshest first; and the hashes taken.

        Only hashes are compared, not tokens.
        """
        found = []
        named: dict[int, int] = {}
        lengths, names, following = self.lengths, self.names, self._next
        donor = self.heads.get(ending, NONE)
        while donor != NONE:
            length = lengths[donor]
            if length <= end:
                name = named.get(length)
                if name is None:
                    name = named[length] = self.hash_function(data[TOKEN_BYTES * (end - length) : TOKEN_BYTES * end])
                if name == names[donor]:
                    found.append(donor)
            donor = following[donor]
        return found, len(named)

    def all_shorter(self, ending: int, chunk_end: int, equal_ends: Mapping[tuple[int, int], int]) -> bool:
        """Whether a known equal span reaches `chunk_end` for every donor of an ending.

        Args:
            equal_ends: `(serial of a node, shift)` -> the end of the equal span.
        """
        nodes, starts, lengths, following = self.nodes, self.starts, self.lengths, self._next
        donor = self.heads.get(ending, NONE)
        while donor != NONE:
            place = nodes[donor].serial, chunk_end - starts[donor] - lengths[donor]  # type: ignore[union-attr]
            if chunk_end > equal_ends.get(place, 0):
                return False
            donor = following[donor]
        return True

    def of(self, ending: int) -> list[int]:
        """All donors of an ending, freshest first."""
        found = []
        donor = self.heads.get(ending, NONE)
        while donor != NONE:
            found.append(donor)
            donor = self._next[donor]
        return found

    def node(self, donor: int) -> Node:
        """The node of the donor's last token."""
        node = self.nodes[donor]
        assert node is not None, "a donor of the table has a node"
        return node

    def end(self, donor: int) -> int:
        """The position after the donor's last token."""
        return self.starts[donor] + self.lengths[donor]

    def remove(self, donor: int) -> None:
        """Remove one donor. Cost O(1), as lists are bounded."""
        node = self.node(donor)
        # The last one takes its place: the order inside a node means nothing.
        last = node.donors.pop()
        if last != donor:
            node.donors[self._places[donor]] = last
            self._places[last] = self._places[donor]
        self._unlink(donor)

    def remove_all(self, node: Node) -> None:
        """Remove every donor of `node`; the other donors may be renumbered."""
        for donor in node.donors:
            self._unlink(donor)
        node.donors = []
        if len(self._free) > 2 * len(self) + _MIN_FREE:
            self._compact()

    def move_below(self, upper: Node, lower: Node) -> None:
        """Move the donors that end after the cut to `lower`, after a split."""
        donors, upper.donors, lower.donors = upper.donors, [], []
        for donor in donors:
            self._hold(upper if self.end(donor) <= lower.start else lower, [donor])

    def close(self) -> None:
        """Subtract the filter of an empty table from the sizes when its namespace is removed."""
        assert not self.heads, "a table is closed when it is empty"
        self._size.num_filter_slots -= self.filter.num_slots

    def _least_wanted(self, donors: list[int]) -> int:
        """The oldest donor that is not pinned, or the oldest of all."""
        for donor in reversed(donors):
            if not self.node(donor).num_pins:
                return donor
        return donors[-1]

    def _hold(self, node: Node, donors: list[int]) -> None:
        """Note that donors end in `node`."""
        place = len(node.donors)
        for donor in donors:
            self.nodes[donor] = node
            self._places[donor] = place
            place += 1
        node.donors += donors

    def _admit(self, endings: Hashes, donors: Sequence[int]) -> None:
        """Make donors the first ones of their endings."""
        self.heads.update(zip(endings.tolist(), donors, strict=True))
        self._size.num_endings += len(donors)
        if not self.filter.add(endings):
            self._rebuild_filter()

    def _rebuild_filter(self) -> None:
        before = self.filter.num_slots
        self.filter.rebuild(np.fromiter(self.heads, dtype=np.uint32, count=len(self.heads)))
        self._size.num_filter_slots += self.filter.num_slots - before

    def _compact(self) -> None:
        """Renumber donors without the free numbers, to free their memory. Cost O(all numbers)."""
        live = np.array([donor for donor, node in enumerate(self.nodes) if node is not None], dtype=np.int64)
        # NONE is -1, the last entry.
        numbers = np.full(len(self.nodes) + 1, NONE, dtype=np.int32)
        numbers[live] = np.arange(len(live), dtype=np.int32)
        self.nodes = [self.nodes[donor] for donor in live.tolist()]
        for node in dict.fromkeys(self.nodes):
            assert node is not None
            node.donors = numbers[node.donors].tolist()
        heads = list(zip(self.heads, numbers[list(self.heads.values())].tolist(), strict=True))
        # In place: the planner keeps a reference while it forgets paths.
        self.heads.clear()
        self.heads.update(heads)
        for column in self._columns:
            column[:] = _take(column, live)
        self._next[:] = array("i", numbers[self._next].tobytes())
        self._free = []

    def _take_slots(self, num: int) -> list[int]:
        num_free, num_before = min(num, len(self._free)), len(self.nodes)
        numbers = [self._free.pop() for _ in range(num_free)]
        numbers += range(num_before, num_before + num - num_free)
        self.nodes += [None] * (num - num_free)
        for column in self._columns:
            column.frombytes(bytes(column.itemsize * (num - num_free)))
        return numbers

    def _unlink(self, donor: int) -> None:
        ending, following = self.endings[donor], self._next[donor]
        before = self.heads[ending]
        if before == donor:
            if following == NONE:
                del self.heads[ending]
                self._size.num_endings -= 1
                if self.filter.is_stale(len(self.heads)):
                    self._rebuild_filter()
            else:
                self.heads[ending] = following
        else:
            while self._next[before] != donor:
                before = self._next[before]
            self._next[before] = following
        self.nodes[donor] = None
        self._free.append(donor)
        self._size.num_donors -= 1


def _take(column: array[int], rows: npt.NDArray[np.int64]) -> array[int]:
    return array(column.typecode, np.frombuffer(column, dtype=column.typecode)[rows].tobytes())
