"""The token paths of one namespace, each stored once however many paths begin with it.

Owns tokens, and which of them are *eligible*: computed by their own request at their own position, so that their rows
may be donated. Must not know chunks, hashes or plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import numpy as np

from sglang_pic.core.chunker import Tokens
from sglang_pic.core.spans import Span, subtract_spans

__all__ = ["Segment", "Trie", "common_len", "common_suffix_len"]

_FIRST_BLOCK = 64
_TRUE = b"\x01"


class Segment:
    """Tokens `[start, end)` of every path through it; a node of the trie, and the unit of eviction.

    `parent` is None for a root, and for a segment that has been removed. `eligible` are absolute positions, ascending,
    disjoint, not touching. `donors` belongs to the donor table: the donors whose last token lies here.
    """

    __slots__ = ("children", "donors", "eligible", "parent", "serial", "start", "tokens", "trie")

    def __init__(self, trie: Trie, serial: int, parent: Segment | None, start: int, tokens: Tokens) -> None:
        self.trie = trie
        self.serial = serial
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, Segment] = {}
        self.eligible: list[Span] = []
        self.donors: list[int] = []

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def eligible_around(self, position: int) -> Span | None:
        """The eligible span that holds `position`, if one does."""
        spans = self.eligible
        if len(spans) == 1:
            span = spans[0]
            return span if span[0] <= position < span[1] else None
        i = bisect_right(spans, position, key=lambda span: span[0]) - 1
        return spans[i] if i >= 0 and position < spans[i][1] else None

    def lineage(self) -> list[Segment]:
        """The segments from the root's child to this one."""
        line = []
        node: Segment | None = self
        while node is not None and node.parent is not None:
            line.append(node)
            node = node.parent
        line.reverse()
        return line


class Trie:
    """A radix trie over token ids.

    Args:
        namespace: what the paths belong to.
        ages: every segment but the roots, oldest first; shared by all tries of an index. A parent is always younger
            than its children, so the oldest is a leaf.
    """

    def __init__(self, namespace: Hashable, ages: OrderedDict[int, Segment], serials: Iterable[int]) -> None:
        self.namespace = namespace
        self._ages = ages
        self._serials = iter(serials)
        self.root = Segment(self, -1, None, 0, np.empty(0, dtype="<i4"))

    def walk(self, tokens: Tokens) -> tuple[Segment, int]:
        """The deepest segment on the path of `tokens`, and how many leading tokens are stored."""
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common_len(child.tokens, tokens[at:])
            at += same
            node = child
            if same < len(child.tokens):
                break
        return node, at

    def append(self, parent: Segment, tokens: Tokens) -> Segment:
        """A child of `parent` that holds a copy of `tokens`; `parent` must not have one with the same first token."""
        child = self._new(parent, parent.end, tokens.copy())
        parent.children[int(tokens[0])] = child
        self._ages[child.serial] = child
        return child

    def split(self, segment: Segment, position: int) -> Segment:
        """Cut `segment` in two; it keeps `[start, position)`, the lower part, which is returned, gets the rest.

        The caller moves the donors. NOTE: the lower part becomes the youngest; before anything is evicted the caller
        removes it or touches the path, because every segment is to be younger than its children.
        """
        head = position - segment.start
        lower = self._new(segment, position, segment.tokens[head:].copy())
        lower.children = segment.children
        for child in lower.children.values():
            child.parent = lower
        lower.eligible = subtract_spans(segment.eligible, [(segment.start, position)])
        segment.eligible = subtract_spans(segment.eligible, [(position, segment.end)])
        segment.tokens = segment.tokens[:head].copy()
        segment.children = {int(lower.tokens[0]): lower}
        self._ages[lower.serial] = lower
        return lower

    def remove(self, leaf: Segment) -> None:
        """Take out a segment without children; removing its donors is the caller's."""
        assert not leaf.children, "only a leaf can be removed"
        assert leaf.parent is not None, "a root cannot be removed"
        del leaf.parent.children[int(leaf.tokens[0])]
        del self._ages[leaf.serial]
        leaf.parent = None

    def touch(self, segments: Iterable[Segment]) -> None:
        """Make the paths to `segments` the youngest, ancestors younger than their descendants; removed ones are left.

        Cost O(n log n) in the distinct segments of all paths.
        """
        touched: dict[int, Segment] = {}
        for segment in segments:
            node = segment
            while node.parent is not None and node.serial not in touched:
                touched[node.serial] = node
                node = node.parent
        for node in sorted(touched.values(), key=lambda node: -node.start):
            self._ages.move_to_end(node.serial)

    def _new(self, parent: Segment, start: int, tokens: Tokens) -> Segment:
        return Segment(self, next(self._serials), parent, start, tokens)


def common_len(left: Tokens, right: Tokens) -> int:
    """How many leading tokens are equal. Cost O(result), not O(length): blocks of growing size are compared."""
    limit = min(len(left), len(right))
    at, block = 0, _FIRST_BLOCK
    while at < limit:
        stop = min(at + block, limit)
        # `bytes.find` is several times faster than numpy's `argmax` on so few.
        first = (left[at:stop] != right[at:stop]).tobytes().find(_TRUE)
        if first >= 0:
            return at + first
        at = stop
        block *= 4
    return limit


def common_suffix_len(left: Tokens, right: Tokens) -> int:
    """How many trailing tokens are equal. Cost O(result)."""
    limit = min(len(left), len(right))
    # Seen from the ends, so that the two need not be equally long.
    left, right = left[len(left) - limit :], right[len(right) - limit :]
    at, block = limit, _FIRST_BLOCK
    while at > 0:
        start = max(0, at - block)
        last = (left[start:at] != right[start:at]).tobytes().rfind(_TRUE)
        if last >= 0:
            return limit - start - last - 1
        at = start
        block *= 4
    return limit
