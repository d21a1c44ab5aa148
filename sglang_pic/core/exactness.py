"""Which rows of a path are exact, the rows of a full prefill, and which are approximate.

A row is exact if its request computed it with no spliced row before it; a spliced row, and a row computed after one, is
approximate. Rows are marked in the trie when they are published. Rows that were not published, or whose path the index
has evicted, are unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import Node, Trie


class Exactness(NamedTuple):
    """A path in three parts, in tokens.

    [0, exact_len)      exact
    unknown_len more    the first row is unknown
    approximate_len     the rest: the first row is approximate
    """

    exact_len: int = 0
    unknown_len: int = 0
    approximate_len: int = 0

    def approximate(self, spliced: Sequence[Span], end: int) -> list[Span]:
        """The approximate spans of a request of `end` tokens with this prefix and the `spliced` spans."""
        first = spliced[0][0] if spliced else end
        return merge_spans([(self.exact_len + self.unknown_len if self.approximate_len else first, end)])


def exactness_of(trie: Trie, tokens: Tokens) -> Exactness:
    """The exactness of the path `tokens`. Cost: one walk over its stored part."""
    node, stored = trie.walk(tokens)
    line = node.lineage()
    first = next((each.approximate[0][0] for each in line if each.approximate), stored)
    if first >= stored:
        first = len(tokens)
    at = 0
    for start, end in itertools.chain.from_iterable(each.eligible for each in line):
        if start > at:
            break
        at = end
    exact_len = min(at, stored, first)
    return Exactness(exact_len, first - exact_len, len(tokens) - first)


def mark_approximate(path: Sequence[Node], approximate: Sequence[Span], others: Sequence[Span]) -> None:
    """Mark rows of a path as approximate, and `others` as not; spans ascending and disjoint."""
    for node in path:
        if node.approximate:
            node.approximate = subtract_spans(node.approximate, others)
        found = intersect_spans(approximate, node.start, node.end)
        if found:
            node.approximate = merge_spans([*node.approximate, *found])
