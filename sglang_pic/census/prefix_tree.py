"""A prefix cache that records which call stored each token; calls are numbers."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.outcome import EXPECTED_LEN
from sglang_pic.core.trie import Node, Trie

_ENDS = -1
"""Stands for the first token of the next node where a path ends."""


class Match(NamedTuple):
    """The longest stored prefix of a prompt; fields as in `Outcome`, with the neighbor as a number."""

    prefix_len: int
    neighbor: int | None
    expected: Tokens


class PrefixTree:
    """The paths of all calls so far, or those in a KV pool: SGLang's LRU tree with pages of one token.

    Memory grows with distinct tokens; every method costs O(tokens given).

    Args:
        pool: tokens that the tree holds after an insertion, if that evicts; None for no limit.
    """

    def __init__(self, pool: int | None = None) -> None:
        self._pool, self._num_tokens = pool, 0
        self._ages: OrderedDict[int, Node] = OrderedDict()
        self._trie = Trie(None, self._ages, itertools.count())
        # Indexed by a node's serial, which counts from 0: the call that stored the node, the latest call whose
        # path goes through it, and the token with which that path goes on.
        self._appender: list[int] = []
        self._latest: list[int] = []
        self._onward: list[int] = []

    def match(self, prompt: Tokens) -> Match:
        """The longest stored prefix of `prompt`, and how its latest path continues."""
        node, stored = self._find(prompt)
        if stored == 0:
            return Match(0, None, np.empty(0, dtype=np.int32))
        prefix_len = min(stored, len(prompt) - 1)
        return Match(prefix_len, self._latest[node.serial], self._follow(node, prefix_len))

    def insert(self, path: Tokens, call: int) -> int:
        """Store the path of a call.

        Args:
            path: prompt and answer.
            call: its number, greater than all earlier ones.

        Returns:
            Number of leading tokens that were stored before.
        """
        node, stored = self._trie.walk(path)
        if stored < node.end:
            # NOTE: also where the path ends, so that paths end at the ends of nodes only.
            self._split(node, stored)
        if stored < len(path):
            node = self._trie.append(node, path[stored:])
            self._note(node, appender=call)
            self._num_tokens += len(node.tokens)
        leaf = node
        onward = _ENDS
        while node.parent is not None:
            self._latest[node.serial] = call
            self._onward[node.serial] = onward
            onward = int(node.tokens[0])
            node = node.parent
        self._evict(leaf)
        return stored

    def num_resident(self, path: Tokens) -> int:
        """How many leading tokens of a path are in the pool; they are touched."""
        return self._find(path)[1]

    def appender(self, path: Tokens, position: int) -> int:
        """The call that first stored `path[: position + 1]`, which must be in the tree."""
        node, stored = self._trie.walk(path[: position + 1])
        assert stored == position + 1, f"position {position} of a path that is stored up to {stored}"
        return self._appender[node.serial]

    def _find(self, path: Tokens) -> tuple[Node, int]:
        """As `Trie.walk`; in a pool the found tokens are touched."""
        node, stored = self._trie.walk(path)
        if self._pool is not None:
            if 0 < stored < node.end:
                self._split(node, stored)
            self._trie.touch([node])
        return node, stored

    def _evict(self, youngest: Node) -> None:
        """Touch the path to `youngest`, and remove the oldest leaves until the rest fits."""
        if self._pool is None:
            return
        self._trie.touch([youngest])
        while self._num_tokens > self._pool:
            oldest = next(iter(self._ages.values()))
            self._num_tokens -= len(oldest.tokens)
            self._trie.remove(oldest)

    def _follow(self, node: Node, start: int) -> Tokens:
        """The latest path through `node`, from `start` in it on."""
        parts = [node.tokens[start - node.start :][:EXPECTED_LEN]]
        missing = EXPECTED_LEN - len(parts[0])
        # In a pool the path may have been evicted from its end.
        while missing and (first := self._onward[node.serial]) in node.children:
            node = node.children[first]
            parts.append(node.tokens[:missing])
            missing -= len(parts[-1])
        # A copy in any case: a view would keep a whole node alive after it has been split.
        return np.concatenate(parts)

    def _split(self, node: Node, position: int) -> None:
        lower = self._trie.split(node, position)
        self._note(lower, appender=self._appender[node.serial])
        # No path ends inside a node: all paths through the upper part continue in the lower one. The upper part
        # belongs to the path that splits it, and is marked by it.
        self._latest[lower.serial] = self._latest[node.serial]
        self._onward[lower.serial] = self._onward[node.serial]
        self._onward[node.serial] = int(lower.tokens[0])

    def _note(self, node: Node, *, appender: int) -> None:
        assert node.serial == len(self._appender), "serials count the nodes"
        self._appender.append(appender)
        self._latest.append(appender)
        self._onward.append(_ENDS)
