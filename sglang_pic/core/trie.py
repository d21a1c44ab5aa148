"""The token paths of one namespace in a radix trie, with the positions that are *eligible* to be donors.

A position is eligible if its own request computed its row there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.spans import Span, intersect_spans
from sglang_pic.core.tokens import Tokens


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Tokens `[start, end)` of every path through it; the unit of eviction.

    Spans are absolute positions, ascending, disjoint, not touching.
    """

    trie: Trie
    serial: int
    parent: Node | None
    """None for a root and for a removed node."""
    start: int
    tokens: Tokens
    children: dict[int, Node] = field(default_factory=dict)
    eligible: list[Span] = field(default_factory=list)
    approximate: list[Span] = field(default_factory=list)
    """Spliced rows, and rows computed after them."""
    donors: list[int] = field(default_factory=list)
    """The donor table's: those whose last token is here."""
    generations: list[tuple[int, int]] = field(default_factory=list)
    """`(position, number)`, both ascending: rows from the position on depend on at least so many changed fields."""
    num_pins: int = 0
    """Pinned paths through the node."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def eligible_around(self, position: int) -> Span | None:
        """The eligible span with `position`, if there is one."""
        spans = self.eligible
        if len(spans) == 1:
            span = spans[0]
            return span if span[0] <= position < span[1] else None
        i = bisect_right(spans, position, key=lambda span: span[0]) - 1
        return spans[i] if i >= 0 and position < spans[i][1] else None

    def generation(self, end: int) -> int:
        """The highest generation in this node before position `end`; 0 if it has none."""
        if not self.generations:
            return 0
        steps = bisect_left(self.generations, (end, 0))
        return self.generations[steps - 1][1] if steps else 0

    def add_generation(self, position: int, number: int) -> None:
        """Raise the generation of the rows from `position` on to at least `number`."""
        if number > self.generation(position + 1):
            steps = [step for step in self.generations if step[0] < position or step[1] > number]
            insort(steps, (position, number))
            self.generations = steps

    def lineage(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        line = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            line.append(node)
            node = node.parent
        line.reverse()
        return line


class Trie:
    """A radix trie over token ids.

    Args:
        namespace: the namespace of the paths.
        ages: every node but the roots, oldest first; shared by all tries of an index. A parent is always younger than
            its children, so the oldest is a leaf.
        serials: gives each node a number of its own.
    """

    def __init__(self, namespace: Hashable, ages: OrderedDict[int, Node], serials: Iterable[int]) -> None:
        self.namespace = namespace
        self._ages = ages
        self._serials = iter(serials)
        self.root = Node(self, -1, None, 0, np.empty(0, dtype="<i4"))
        self.num_steps = 0
        """Nodes visited by comparisons, for the cost of plans."""

    def walk(self, tokens: Tokens) -> tuple[Node, int]:
        """The deepest node on the path `tokens`, and how many leading tokens are stored."""
        return equal_end(self.root, 0, 0, tokens, len(tokens), ANY)

    def append(self, parent: Node, tokens: Tokens) -> Node:
        """Add a child with a copy of `tokens`; `parent` must not have one with the same first token."""
        child = Node(self, next(self._serials), parent, parent.end, tokens.copy())
        parent.children[int(tokens[0])] = child
        self._ages[child.serial] = child
        return child

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` at `position`: it keeps the upper part; returns the new lower part.

        The caller moves the donors. NOTE: the lower part becomes the youngest node; before anything is evicted the
        caller must remove it or touch the path, because every node must be younger than its children.
        """
        head = position - node.start
        lower = Node(self, next(self._serials), node, position, node.tokens[head:].copy())
        lower.children = node.children
        for child in lower.children.values():
            child.parent = lower
        lower.num_pins = node.num_pins
        lower.generations = [step for step in node.generations if step[0] >= position]
        node.generations = [step for step in node.generations if step[0] < position]
        lower.eligible = intersect_spans(node.eligible, position, node.end)
        node.eligible = intersect_spans(node.eligible, node.start, position)
        lower.approximate = intersect_spans(node.approximate, position, node.end)
        node.approximate = intersect_spans(node.approximate, node.start, position)
        node.tokens = node.tokens[:head].copy()
        node.children = {int(lower.tokens[0]): lower}
        self._ages[lower.serial] = lower
        return lower

    def remove(self, leaf: Node) -> None:
        """Remove a node without children; the caller removes its donors."""
        assert not leaf.children, "only a leaf can be removed"
        assert leaf.parent is not None, "a root cannot be removed"
        del leaf.parent.children[int(leaf.tokens[0])]
        del self._ages[leaf.serial]
        leaf.parent = None

    def touch(self, nodes: Iterable[Node]) -> None:
        """Make the paths to `nodes` the youngest, ancestors younger than their descendants; ignores removed nodes.

        Cost O(n log n) in the distinct nodes of all paths.
        """
        touched: dict[int, Node] = {}
        for node in nodes:
            at = node
            while at.parent is not None and at.serial not in touched:
                touched[at.serial] = at
                at = at.parent
        for node in sorted(touched.values(), key=lambda node: -node.start):
            self._ages.move_to_end(node.serial)


def node_before(node: Node, end: int) -> Node:
    """The node on the path to `node` with the token before `end`."""
    while node.start >= end:
        assert node.parent is not None, "a path has no token before position 0"
        node = node.parent
    return node


def tokens_before(node: Node, end: int, length: int) -> Tokens:
    """The `length` tokens before position `end` of the path to `node`; `length` must not exceed `end`."""
    parts: list[Tokens] = []
    at = end
    while at > end - length:
        node = node_before(node, at)
        if node.start <= end - length and not parts:
            return node.tokens[end - length - node.start : end - node.start]
        parts.append(node.tokens[max(0, end - length - node.start) : at - node.start])
        at = node.start
    return np.concatenate(parts[::-1]) if parts else node.tokens[:0]


class Rows(IntEnum):
    """Tokens of a path that an equal span may cover: any, or the eligible ones."""

    ANY = 0
    ELIGIBLE = 1


# Looking a member up in its class costs as much as comparing a few tokens.
ANY: Final = Rows.ANY
ELIGIBLE: Final = Rows.ELIGIBLE


def equal_start(node: Node, end: int, shift: int, tokens: Tokens, low: int, rows: Rows) -> tuple[Node, int, bool]:
    """The start of the longest span of `tokens` that ends at `end` and equals the path to `node`, `shift` earlier.

    Returns:
        The node of the token before the span, or of its first token; the start, at least `low`; and whether the token
        before it differs.
    """
    at = end
    while at > low:
        while at - shift <= node.start:
            assert node.parent is not None
            node = node.parent
            node.trie.num_steps += 1
        floor = node.start + shift
        if rows is ELIGIBLE:
            span = node.eligible_around(at - shift - 1)
            if span is None:
                break
            floor = span[0] + shift
        floor = floor if floor > low else low
        at -= token_loops.equal_before(node.tokens, at - shift - node.start, tokens, at, at - floor)
        if at > floor:
            return node, at, True
    return node, at, False


def equal_end(node: Node, start: int, shift: int, tokens: Tokens, stop: int, rows: Rows) -> tuple[Node, int]:
    """The end of the longest span of `tokens` that begins at `start` and equals a path through `node`, `shift` earlier.

    Returns:
        The node of the last token, and the end, at most `stop`.
    """
    at = start
    while at < stop:
        following = node if at - shift < node.start + len(node.tokens) else node.children.get(int(tokens[at]))
        if following is None:
            break
        if rows is ELIGIBLE:
            span = following.eligible_around(at - shift)
            if span is None:
                break
            last = span[1]
        else:
            last = following.end
        node = following
        node.trie.num_steps += 1
        limit = last + shift if last + shift < stop else stop
        at += token_loops.equal_from(node.tokens, at - shift - node.start, tokens, at, limit - at)
        if at < limit:
            break
    return node, at
