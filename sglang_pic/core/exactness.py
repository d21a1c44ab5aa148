"""What is known of the rows of a path: which of them are those that a full prefill gives.

A row is exact if its request computed it with no spliced row before it. A row that was spliced, or computed behind
such rows, is approximate. The trie notes approximate rows as they are published. Of rows that nobody published, or that
the index has forgotten at its bounds, it knows neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans
from sglang_pic.core.tokens import Tokens
from sglang_pic.core.trie import Node, Trie


class Exactness(NamedTuple):
    """The leading rows of a path, in tokens.

    [0, exact_len)      exact
    unknown_len more    nothing is known of the first of them
    approximate_len     the rest: the first of them is approximate, and others may stand behind it
    """

    exact_len: int = 0
    unknown_len: int = 0
    approximate_len: int = 0

    def approximate(self, spliced: Sequence[Span], end: int) -> list[Span]:
        """What is approximate of a row of `end` tokens that begins with these, and has `spliced` behind them."""
        first = spliced[0][0] if spliced else end
        return merge_spans([(self.exact_len + self.unknown_len if self.approximate_len else first, end)])


def exactness_of(trie: Trie, tokens: Tokens) -> Exactness:
    """What a trie knows of the path `tokens`. Cost: one walk over what is stored of it."""
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
    """Note which rows of a path are approximate, and that `others` are not; spans ascending and disjoint."""
    for node in path:
        if node.approximate:
            node.approximate = subtract_spans(node.approximate, others)
        found = intersect_spans(approximate, node.start, node.end)
        if found:
            node.approximate = merge_spans([*node.approximate, *found])
