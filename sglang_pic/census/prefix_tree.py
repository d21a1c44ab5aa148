"""A prefix cache that knows which call stored each token; here a call is a number. Unlimited or with eviction."""

from __future__ import annotations

import heapq
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
    """How far a prompt is stored: the fields of `Outcome`, with the neighbor by its number."""

    prefix_len: int
    neighbor: int | None
    expected: Tokens


class PrefixTree:
    """The paths of all calls so far. Memory grows with distinct tokens; every method costs O(tokens given).

    Args:
        max_tokens: evict beyond that, as SGLang does: of the leaves the one that was not matched for longest, whole.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self.num_tokens = 0
        self.has_evicted = False
        self._max_tokens = max_tokens
        # By a node's serial when it was last matched or stored, and `(when, serial, node)` of every node that was a
        # leaf then: what changed since is passed over.
        self._used: dict[int, int] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = itertools.count()
        self._trie = Trie(None, OrderedDict(), itertools.count())
        # Indexed by a node's serial, which counts from 0: the call that stored the node, the latest call whose
        # path goes through it, and the token with which that path goes on.
        self._appender: list[int] = []
        self._latest: list[int] = []
        self._onward: list[int] = []

    def match(self, prompt: Tokens) -> Match:
        """The longest prefix of `prompt` that is stored, and how it went on the last time."""
        node, stored = self._reach(prompt)
        if stored == 0:
            return Match(0, None, np.empty(0, dtype=np.int32))
        prefix_len = min(stored, len(prompt) - 1)
        return Match(prefix_len, self._latest[node.serial], self._follow(node, prefix_len))

    def resident_len(self, path: Tokens) -> int:
        """How many leading tokens of a path are stored; they count as used."""
        return self._reach(path)[1]

    def insert(self, path: Tokens, call: int) -> int:
        """Store the path of a call, then evict what is too much.

        Args:
            path: prompt and answer.
            call: its number; greater than those before.

        Returns:
            How many of its leading tokens were there already.
        """
        node, stored = self._trie.walk(path)
        if stored < node.end:
            # NOTE: also where the path ends, so that paths end at the ends of nodes only.
            self._split(node, stored)
        if stored < len(path):
            node = self._trie.append(node, path[stored:])
            self._note(node, appender=call)
            self.num_tokens += len(path) - stored
        self._touch(node)
        onward = _ENDS
        while node.parent is not None:
            self._latest[node.serial] = call
            self._onward[node.serial] = onward
            onward = int(node.tokens[0])
            node = node.parent
        if self._max_tokens is not None:
            self._evict(self._max_tokens)
        return stored

    def appender(self, path: Tokens, position: int) -> int:
        """The call that first stored `path[: position + 1]`; all of it is to be in the tree."""
        node, stored = self._trie.walk(path[: position + 1])
        assert stored == position + 1, f"position {position} of a path that is stored up to {stored}"
        return self._appender[node.serial]

    def _follow(self, node: Node, start: int) -> Tokens:
        """The latest path through `node`, from `start` in it on."""
        parts = [node.tokens[start - node.start :][:EXPECTED_LEN]]
        missing = EXPECTED_LEN - len(parts[0])
        while missing and (first := self._onward[node.serial]) != _ENDS:
            if first not in node.children:
                break  # It was evicted.
            node = node.children[first]
            parts.append(node.tokens[:missing])
            missing -= len(parts[-1])
        # A copy in any case: a view would keep a whole node alive after it has been split.
        return np.concatenate(parts)

    def _reach(self, path: Tokens) -> tuple[Node, int]:
        """Match as SGLang does, which cuts a node where the path leaves it: the rest of the node was not used."""
        node, stored = self._trie.walk(path)
        if self._max_tokens is not None:
            if stored < node.end:
                self._split(node, stored)
            self._touch(node)
        return node, stored

    def _touch(self, node: Node) -> None:
        if self._max_tokens is None:
            return
        now = next(self._clock)
        if not node.children:
            heapq.heappush(self._leaves, (now, node.serial, node))
        while node.parent is not None:
            self._used[node.serial] = now
            node = node.parent

    def _evict(self, max_tokens: int) -> None:
        while self.num_tokens > max_tokens:
            used, serial, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.children or used != self._used[serial]:
                continue
            self._trie.remove(node)
            del self._used[serial]
            self.num_tokens -= len(node.tokens)
            self.has_evicted = True
            if not parent.children and parent.parent is not None:
                heapq.heappush(self._leaves, (self._used[parent.serial], parent.serial, parent))

    def _split(self, node: Node, position: int) -> None:
        lower = self._trie.split(node, position)
        if self._max_tokens is not None:
            self._used[lower.serial] = used = self._used[node.serial]
            if not lower.children:
                heapq.heappush(self._leaves, (used, lower.serial, lower))
        self._note(lower, appender=self._appender[node.serial])
        # No path ends inside a node: whatever went through the upper part went on into the lower one. The upper part
        # belongs to the path that splits it, and is marked by it.
        self._latest[lower.serial] = self._latest[node.serial]
        self._onward[lower.serial] = self._onward[node.serial]
        self._onward[node.serial] = int(lower.tokens[0])

    def _note(self, node: Node, *, appender: int) -> None:
        assert node.serial == len(self._appender), "serials count the nodes"
        self._appender.append(appender)
        self._latest.append(appender)
        self._onward.append(_ENDS)
