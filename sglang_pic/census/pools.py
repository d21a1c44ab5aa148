"""Reuse by the size of the KV pool, for all sizes in one pass: stack distances (Mattson et al., 1970).

The *distance* of a row is the number of rows touched since it was touched last, itself included: an LRU pool of at
least so many tokens still has it. As in SGLang, a call touches the paths of its donors, then its own with the answer,
and a path is evicted from its end.

Approximated: each run has the donor that it has in an unlimited cache, and its rows are priced by their own distances.
A server whose pool lost that donor may have another, or have computed its text again. It evicts whole nodes, whose
ends may be in use no longer than their beginnings; and calls that run side by side lock their rows.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import numpy as np
from pic_traces.encode.encoded import Tokens

from sglang_pic.census.outcome import Outcome
from sglang_pic.core.trie import Trie

KNEE = 0.9
"""The share of an unlimited cache's hits that a pool must have to be large enough."""
HOST_RATIO = 2
"""Of host rows to device rows: SGLang's default for `--hicache-ratio`. The host has the device's rows, too."""
_UNLIMITED = 1 << 40
_NEVER = 0


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens by their source, in a KV pool of so many tokens; the rest is computed."""

    tokens: int | None
    """None for an unlimited pool."""
    prefix_tokens: int
    chunk_tokens: int
    host_tokens: int
    """Further hits whose rows are on the host, with HiCache and `HOST_RATIO`."""


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reuse by pool size, over all files with text."""

    prompt_tokens: int
    session_tokens: float
    """A session's longest prompt, mean over sessions."""
    longest_prompt: int
    knee_tokens: int
    """The smallest pool with `KNEE` of an unlimited cache's hits."""
    refused_calls: int
    """Calls that the pool asked for cannot hold: a server refuses them."""
    pools: list[Pool]
    """Ascending, the unlimited one last."""


class RowStack:
    """The rows of all paths so far by when they were touched last. Memory grows with distinct tokens and with paths."""

    def __init__(self) -> None:
        self._trie = Trie(None, OrderedDict(), itertools.count())
        # When each node was touched last, by serial; and the rows that were touched last at each time.
        self._touched: list[int] = []
        self._rows = _Sums()

    def distances(self, path: Tokens, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The rows `[start, end)` of a path that was touched.

        Yields:
            `(before, number)`: the rows of a span have the distances `before + 1` to `before + number`.
        """
        node, stored = self._trie.walk(path[:end])
        assert stored == end, f"rows up to {end} of a path that is stored up to {stored}"
        at, before = _NEVER, 0
        for part in node.lineage():
            if self._touched[part.serial] != at:
                at = self._touched[part.serial]
                before = self._rows.after(at)
            # NOTE: rows with one time are of one path, and the first of them is an ancestor of the others.
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                yield before + first - part.start, last - first
            before += len(part.tokens)

    def touch(self, path: Tokens) -> None:
        """Touch a path, of which any part may be new. Costs O(log paths) for each of its nodes."""
        node, stored = self._trie.walk(path)
        if stored < node.end:
            self._trie.split(node, stored)
            self._touched.append(self._touched[node.serial])
        if stored < len(path):
            node = self._trie.append(node, path[stored:])
            self._touched.append(_NEVER)
        now = self._rows.append(len(path))
        for part in node.lineage():
            if self._touched[part.serial] != _NEVER:
                self._rows.add(self._touched[part.serial], -len(part.tokens))
            self._touched[part.serial] = now


class PoolCurve:
    """Hits by pool size. Memory grows by 16 bytes for each span of reused rows that were touched together."""

    def __init__(self) -> None:
        self._stack = RowStack()
        # Spans of reused rows, as `RowStack.distances` yields them, one after the other.
        self._prefix, self._chunk = array("q"), array("q")
        self._prompt_lens = array("q")
        self._longest: dict[tuple[str, str], int] = {}

    def begin_cache(self) -> None:
        """Continue with an empty cache."""
        self._stack = RowStack()

    def observe(self, outcome: Outcome) -> None:
        """Count one call; calls come in the order in which they are served."""
        tokens = outcome.encoded.tokens
        for span in self._stack.distances(tokens, 0, outcome.prefix_len):
            self._prefix.extend(span)
        paths = [donor.tokens(run.end - run.shift) for run, donor in zip(outcome.runs, outcome.donors, strict=True)]
        for run, path in zip(outcome.runs, paths, strict=True):
            for span in self._stack.distances(path, run.start - run.shift, len(path)):
                self._chunk.extend(span)
        for path in [*paths, outcome.encoded.path]:
            self._stack.touch(path)
        self._prompt_lens.append(len(tokens))
        session = outcome.ref.file, outcome.ref.session
        self._longest[session] = max(self._longest.get(session, 0), len(tokens))

    def hits(self, pool: int) -> tuple[int, int]:
        """Prefix hits and spliced tokens in a pool of so many tokens. O(spans)."""
        return _within(self._prefix, pool), _within(self._chunk, pool)

    def least_pool(self, share: float) -> int:
        """The smallest pool with this share of an unlimited pool's hits."""
        wanted = share * sum(self.hits(_UNLIMITED))
        return bisect_left(range(_UNLIMITED), wanted, key=lambda size: sum(self.hits(size)))

    def result(self, pool: int) -> Pools | None:
        """The hits in pools of so many tokens, of parts of it and of twice as many; None before the first call."""
        if not self._prompt_lens:
            return None
        longest = max(self._prompt_lens)
        sizes = [size for size in (*(pool >> by for by in (4, 3, 2, 1)), 2 * pool) if size >= longest]
        counted = [(size, self.hits(size), self.hits(HOST_RATIO * size)) for size in sorted([*sizes, pool, _UNLIMITED])]
        return Pools(
            prompt_tokens=sum(self._prompt_lens),
            session_tokens=sum(self._longest.values()) / len(self._longest),
            longest_prompt=longest,
            knee_tokens=self.least_pool(KNEE),
            refused_calls=sum(length > pool for length in self._prompt_lens),
            pools=[
                Pool(
                    tokens=None if size == _UNLIMITED else size,
                    prefix_tokens=here[0],
                    chunk_tokens=here[1],
                    host_tokens=sum(with_host) - sum(here),
                )
                for size, here, with_host in counted
            ],
        )


class _Sums:
    """Numbers in the order in which they were appended, and the sums after each; O(log n) (a Fenwick tree)."""

    def __init__(self) -> None:
        self._tree = [0]
        self._total = 0

    def append(self, number: int) -> int:
        """Append a number; returns its place, 1 or more."""
        end = len(self._tree)
        self._tree.append(number + self._up_to(end - 1) - self._up_to(end - (end & -end)))
        self._total += number
        return end

    def add(self, place: int, number: int) -> None:
        """Add to the number at a place."""
        self._total += number
        while place < len(self._tree):
            self._tree[place] += number
            place += place & -place

    def after(self, place: int) -> int:
        """The sum of the numbers after a place."""
        return self._total - self._up_to(place)

    def _up_to(self, place: int) -> int:
        total = 0
        while place:
            total += self._tree[place]
            place &= place - 1
        return total


def _within(spans: array[int], pool: int) -> int:
    """The rows of spans `(before, number)` with a distance of at most `pool`."""
    before, number = np.frombuffer(spans, np.int64).reshape(-1, 2).T
    return int(np.clip(pool - before, 0, number).sum())
