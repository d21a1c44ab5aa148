"""The chunk index: maps chunks to places in the radix tree, in every namespace.

It has no rows; a `RowSource` says whether a donor's rows are still in the radix tree. It is deterministic: the same
calls give the same plans in any process.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from sglang_pic.core import token_loops
from sglang_pic.core.chunker import Chunker, HashFunction, xxh3_name
from sglang_pic.core.core_config import CoreConfig
from sglang_pic.core.donors import DonorTable, TableSize
from sglang_pic.core.exactness import Exactness, exactness_of, mark_approximate
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.plan import Plan, PlanOptions
from sglang_pic.core.planner import make_plan
from sglang_pic.core.published import Published
from sglang_pic.core.query import Query
from sglang_pic.core.row_source import RowSource
from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans
from sglang_pic.core.token_loops import ENDING_LEN
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens, require_tokens
from sglang_pic.core.trie import Node, Trie

# Of equal chunks in one publication only the first ones become donors: the first copy of a repeated text has the most
# equal text after it.
_MAX_DONORS_PER_PUBLICATION = 2

# Estimated from sys.getsizeof on CPython 3.11, dictionary entries included.
_NODE_BYTES = 760
_DONOR_BYTES = 48
_ENDING_BYTES = 110
_NAMESPACE_BYTES = 2_000
_CHARACTER_BYTES = 4

_END = attrgetter("end")
_NO_LIMITS = PlanOptions()


class RowNames(NamedTuple):
    """The tokens that identify a row in the radix tree: those up to the end of its page, and `lookahead` more."""

    page_size: int = 1
    lookahead: int = 0

    def parted(self, position: int) -> Span:
        """Positions whose tokens are equal on paths that diverge at `position`, but whose rows are not shared."""
        named = max(0, position - self.lookahead)
        return named - named % self.page_size, position


@dataclass(slots=True)
class _Namespace:
    trie: Trie
    donors: DonorTable
    num_bytes: int
    """Memory of its name and its empty tables."""


class ContentIndex:
    """Finds text that was computed before, at any position. Not thread-safe: one owner, one thread.

    Args:
        config: sizes and bounds.
        lexicon: the texts of the tokens; without it everything after a changed field is computed.
        hash_function: names a chunk; tests inject weak ones. Tokens are compared in any case.
        names: the tokens that identify a row in the radix tree.
        row_lookahead: tokens after a row that it depends on: 1 if a draft model's row was computed from the next token,
            else 0. A run ends so many tokens before its equal text.
    """

    def __init__(
        self,
        config: CoreConfig | None = None,
        *,
        lexicon: Lexicon | None = None,
        hash_function: HashFunction = xxh3_name,
        names: RowNames | None = None,
        row_lookahead: int = 0,
    ) -> None:
        self.names, self._row_lookahead = names or RowNames(), row_lookahead
        self.config = config or CoreConfig()
        self._lexicon = lexicon
        self._hash = hash_function
        self._chunker = Chunker(self.config, hash_function)
        self.size = TableSize()
        """Of the tables of all namespaces together."""
        # Shrink by eviction, `_forget` and `flush`; a namespace goes with its last path.
        self._ages: OrderedDict[int, Node] = OrderedDict()
        self._namespaces: dict[Hashable, _Namespace] = {}
        self._serials = itertools.count()
        self.num_tokens = self._num_namespace_bytes = 0
        """Tokens of all published paths."""
        self.num_evicted_tokens = 0
        self.num_work = 0
        """Cost of all plans, in tokens compared; for tests of bounded work."""
        # Publications that wait; every other method applies them first.
        self._noted: deque[Callable[[], None]] = deque()
        self.is_whole = True
        """False after an exception during a change; `flush()` repairs it."""

    def note(
        self, namespace: Hashable, tokens: Tokens, rows: Published, delimiters: frozenset[int] = frozenset()
    ) -> None:
        """Publish rows of the radix tree at the next call of any other method, so that no answer waits for it.

        Args:
            namespace: donors of other namespaces are never used.
            tokens: the whole path, from position 0; not to be changed. The last `names.lookahead` have no rows.
            rows: their origin.
            delimiters: ids of the tokens that open or close a message; chunks do not reach across them.

        Positions that diverging paths do not share (`RowNames.parted`) are not eligible: the trie stores them once.

        NOTE: spliced rows in the tree must be noted before the next plan. Cost: O(1) here; when it is published one
        walk over the stored part, then O(new tokens).
        """
        require_tokens(tokens)
        if len(tokens):
            self._noted.append(partial(self._publish, namespace, tokens, rows, delimiters))

    def settle(self) -> None:
        """Apply the publications that wait.

        Raises:
            Exception: a publication failed; `is_whole` is False.
        """
        while self._noted:
            with self._changing():
                self._noted.popleft()()

    def _publish(self, namespace: Hashable, tokens: Tokens, rows: Published, delimiters: frozenset[int]) -> None:
        computed, spliced, approximate, generations = rows
        space = self._space(namespace)
        path, stored = self._store(space, tokens)
        holes = list(spliced)
        if stored < len(tokens):
            # The trie has marked these positions for other paths' rows.
            holes += subtract_spans([self.names.parted(stored)], merge_spans([*computed, *spliced]))
        holes = merge_spans(holes)
        parted = [self.names.parted(node.end) for node in path if len(node.children) > (node is not path[-1])]
        fresh = intersect_spans(merge_spans(computed), 0, len(tokens))
        fresh = subtract_spans(fresh, merge_spans([*parted, *holes]))
        fresh = self._mark(space, path, fresh, holes)
        own = merge_spans(parted)
        found = subtract_spans(merge_spans([*approximate, *spliced]), own)
        mark_approximate(path, found, merge_spans([*computed, *own]))
        for position, number in generations:
            if number and position < len(tokens):
                _holder(path, position + 1).add_generation(position, number)
        if fresh:
            self._add_donors(space, path, tokens, fresh, delimiters)
        space.trie.touch([path[-1]])
        self._evict()

    def plan(
        self,
        namespace: Hashable,
        tokens: Tokens,
        *,
        prefix_len: int,
        rows: RowSource,
        options: PlanOptions | None = None,
    ) -> Plan:
        """Plan the tokens of a prompt after its prefix.

        Args:
            namespace: only its donors are used.
            tokens: the prompt.
            prefix_len: length of the tree's exact match.
            rows: of the donors. A path that is shorter there is shortened here, too.
            options: the request's own settings.

        Returns:
            The plan; its runs are resident according to `rows`.

        Raises:
            ValueError: `prefix_len` is outside the prompt.
        """
        require_tokens(tokens)
        if not 0 <= prefix_len <= len(tokens):
            raise ValueError(f"prefix_len={prefix_len!r}: must be in [0, {len(tokens)}], inside the prompt.")
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None or not space.donors.heads:
            return Plan(prefix_len=prefix_len, end=len(tokens))
        options = options or _NO_LIMITS
        query = Query(
            policy=options.policy or self.config,
            options=options,
            trie=space.trie,
            donors=space.donors,
            lexicon=self._lexicon,
            tokens=tokens,
            prefix_len=prefix_len,
            rows=rows,
            forget=self._forget,
            row_lookahead=self._row_lookahead,
        )
        plan, work = make_plan(query)
        self.num_work += work
        self._drop_if_empty(space)
        return plan

    def exactness(self, namespace: Hashable, tokens: Tokens) -> Exactness:
        """The exactness of a path's rows. Cost: one walk over its stored part."""
        self.settle()
        space = self._namespaces.get(namespace)
        return Exactness(unknown_len=len(tokens)) if space is None else exactness_of(space.trie, tokens)

    def generation(self, namespace: Hashable, tokens: Tokens) -> int:
        """The known generation of the rows at the end of a path: changed fields that they depend on."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None:
            return 0
        node, stored = space.trie.walk(tokens)
        return max((each.generation(min(each.end, stored)) for each in node.lineage()), default=0)

    def pin(self, namespace: Hashable, tokens: Tokens) -> None:
        """Evict the donors on a published path last among the donors of their chunks."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None:
            return
        with self._changing():
            node, stored = space.trie.walk(tokens)
            if node.start < stored < node.end:
                self._split(space, node, stored)
                # The lower part is the youngest until its path is touched again.
                space.trie.touch([node])
            for each in node.lineage():
                each.num_pins += 1

    def unpin(self, namespace: Hashable, tokens: Tokens) -> None:
        """Undo one `pin` of the path's stored part."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is not None:
            for each in space.trie.walk(tokens)[0].lineage():
                each.num_pins = max(0, each.num_pins - 1)

    def flush(self) -> None:
        """Forget everything, also while `is_whole` is False."""
        self._noted.clear()
        self.size, self._ages, self._namespaces = TableSize(), OrderedDict(), {}
        self.num_tokens = self._num_namespace_bytes = 0
        self.is_whole = True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.is_whole = False
        yield
        self.is_whole = True

    def _space(self, namespace: Hashable) -> _Namespace:
        space = self._namespaces.get(namespace)
        if space is None:
            space = _Namespace(
                Trie(namespace, self._ages, self._serials),
                DonorTable(self.config.max_donors_per_chunk, self._hash, self.size),
                _namespace_bytes(namespace),
            )
            self._namespaces[namespace] = space
            self._num_namespace_bytes += space.num_bytes
        return space

    def _store(self, space: _Namespace, tokens: Tokens) -> tuple[list[Node], int]:
        """Store the path `tokens`; returns its nodes, and how many tokens were stored before."""
        node, stored = space.trie.walk(tokens)
        if stored < node.end:
            self._split(space, node, stored)
        if stored < len(tokens):
            node = space.trie.append(node, tokens[stored:])
            self.num_tokens += len(tokens) - stored
        return node.lineage(), stored

    def _split(self, space: _Namespace, node: Node, position: int) -> None:
        lower = space.trie.split(node, position)
        space.donors.move_below(node, lower)

    def _mark(self, space: _Namespace, path: list[Node], computed: list[Span], holes: list[Span]) -> list[Span]:
        """Update the eligible spans along `path`; returns the newly eligible ones."""
        fresh: list[Span] = []
        changed = [*computed[:1], *computed[-1:], *holes[:1], *holes[-1:]]
        low, high = min((span[0] for span in changed), default=0), max((span[1] for span in changed), default=0)
        for node in path:
            if node.end <= low or node.start >= high:
                continue
            before = node.eligible
            gained = intersect_spans(computed, node.start, node.end)
            lost = intersect_spans(holes, node.start, node.end)
            if lost:
                before = subtract_spans(before, lost)
                for donor in [d for d in node.donors if _overlaps(space.donors, d, lost)]:
                    space.donors.remove(donor)
            fresh += subtract_spans(gained, before)
            node.eligible = merge_spans([*before, *gained]) if gained else before
        return merge_spans(fresh)

    def _add_donors(
        self, space: _Namespace, path: list[Node], tokens: Tokens, fresh: list[Span], delimiters: frozenset[int]
    ) -> None:
        """Add donors for the chunks that end in `fresh` spans; a chunk's start need not be eligible."""
        seen: dict[int, int] = {}
        for first, last in fresh:
            cut_from = self._chunker.sync_start(tokens, first, delimiters)
            ends = np.array(self._chunker.cut(tokens, cut_from, last, delimiters=delimiters), np.int32)
            starts = np.concatenate([[np.int32(cut_from)], ends[:-1]])
            is_donor = (ends > first) & (ends - np.maximum(starts, self.config.sink_tokens) >= ENDING_LEN)
            starts, ends = starts[is_donor], ends[is_donor]
            names = self._chunker.names(tokens, starts.tolist(), ends.tolist())
            if len(fresh) > 1 or len(set(names)) < len(names):
                is_early = [_count(seen, name) <= _MAX_DONORS_PER_PUBLICATION for name in names]
                starts, ends = starts[is_early], ends[is_early]
                names = [*compress(names, is_early)]
            endings = token_loops.hash_endings(tokens[cut_from:last])[ends - (ENDING_LEN + cut_from)]
            space.donors.add_all(path, starts, ends, names, endings)

    def _forget(self, node: Node, position: int) -> None:
        """Drop the path to `node` from `position` on, with everything below it."""
        while node.parent is not None and node.start >= position:
            parent = node.parent
            if parent.parent is None or parent.end <= position:
                break
            if len(parent.children) > 1 and self.names.parted(parent.end)[0] <= position:
                break  # The other paths have their own rows there.
            node = parent
        if node.start < position and node.end <= position:
            return
        with self._changing():
            if node.start < position:
                self._split(self._namespaces[node.trie.namespace], node, position)
                (node,) = node.children.values()
            subtree = [node]
            for each in subtree:
                subtree.extend(each.children.values())
            for each in reversed(subtree):
                self._remove_leaf(each)

    def _remove_leaf(self, node: Node) -> None:
        self._namespaces[node.trie.namespace].donors.remove_all(node)
        node.trie.remove(node)
        self.num_tokens -= len(node.tokens)

    @property
    def num_bytes(self) -> int:
        """Estimate of all memory. Cost O(1)."""
        return (
            TOKEN_BYTES * self.num_tokens
            + _NODE_BYTES * len(self._ages)
            + _DONOR_BYTES * self.size.num_donors
            + _ENDING_BYTES * self.size.num_endings
            + self._num_namespace_bytes
            + self.size.num_filter_slots
        )

    def _evict(self) -> None:
        config = self.config
        while self.num_tokens > config.max_index_tokens or self.num_bytes > config.max_index_bytes:
            oldest = next(iter(self._ages.values()), None)
            if oldest is None:
                break
            self.num_evicted_tokens += len(oldest.tokens)
            space = self._namespaces[oldest.trie.namespace]
            self._remove_leaf(oldest)
            self._drop_if_empty(space)

    def _drop_if_empty(self, space: _Namespace) -> None:
        if not space.trie.root.children and self._namespaces.pop(space.trie.namespace, None) is not None:
            space.donors.close()
            self._num_namespace_bytes -= space.num_bytes


def _namespace_bytes(namespace: Hashable) -> int:
    """Memory of a namespace beside its paths: clients choose the lengths of its parts."""
    parts = namespace if isinstance(namespace, tuple) else (namespace,)
    return _NAMESPACE_BYTES + _CHARACTER_BYTES * sum(len(part) for part in parts if isinstance(part, str))


def _overlaps(donors: DonorTable, donor: int, spans: list[Span]) -> bool:
    start, end = donors.starts[donor], donors.end(donor)
    # The first span that ends after the donor's start is the only one that can decide.
    first = bisect_right(spans, start, key=itemgetter(1))
    return first < len(spans) and spans[first][0] < end


def _count(times: dict[int, int], name: int) -> int:
    times[name] = times.get(name, 0) + 1
    return times[name]


def _holder(path: list[Node], end: int) -> Node:
    """The node of `path` with the token before `end`."""
    return path[bisect_left(path, end, 0, len(path) - 1, key=_END)]
