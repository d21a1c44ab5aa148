"""The chunk index: content keys to places in the radix tree, for every namespace.

It holds no rows: whether a donor's rows are still in the radix tree is asked of the resolver.

Everything here is deterministic: the same calls leave the same state and give the same plans, in any process.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_pic.core.chunker import Chunker, HashFunction, xxh3_name
from sglang_pic.core.core_config import CoreConfig
from sglang_pic.core.donors import DonorTable, TableSize
from sglang_pic.core.ending_filter import ending_hashes
from sglang_pic.core.exactness import Exactness, exactness_of, mark_approximate
from sglang_pic.core.lexicon import Lexicon
from sglang_pic.core.plan import Plan, PlanOptions
from sglang_pic.core.planner import Planner, Resolver
from sglang_pic.core.published import Published
from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans
from sglang_pic.core.token_loops import ENDING_LEN
from sglang_pic.core.tokens import TOKEN_BYTES, Tokens, require_tokens
from sglang_pic.core.trie import Node, Trie, tokens_before

# Of equal chunks in one publication only the first ones become donors: of a text that repeats itself the first copy
# has the most equal text after it.
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
    """What the radix tree names a row by: the tokens up to the end of the row's page, and `lookahead` more."""

    page_size: int = 1
    lookahead: int = 0

    def parted(self, position: int) -> Span:
        """The positions whose rows have a name of its own on each of the paths that part at `position`."""
        named = max(0, position - self.lookahead)
        return named - named % self.page_size, position


class IndexStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the index holds, and what it has done since it was made."""

    num_tokens: int
    num_bytes: int
    """Estimate of everything the index keeps in memory."""
    num_paths: int
    num_nodes: int
    num_endings: int
    """Distinct ends of chunks, counted in each namespace."""
    num_donors: int
    num_namespaces: int
    num_evicted_tokens: int
    num_work: int
    """Tokens compared and donors looked at by all plans; for tests of bounded work."""


@dataclass(slots=True)
class _Namespace:
    trie: Trie
    donors: DonorTable
    num_bytes: int
    """Of its name and its empty tables."""


class ContentIndex:
    """Finds text that was computed before, wherever it stands. Not thread-safe: one owner, one thread.

    Args:
        config: sizes and bounds.
        lexicon: the texts of the tokens; without it everything behind a changed field is computed.
        hash_function: names a chunk; tests inject weak ones. Equal names never suffice: tokens are compared.
        names: what the radix tree names a row by.
        row_lookahead: tokens behind a row that it depends on, beside those before it: 1 where a row of a draft model
            was computed from the next token, else 0. A run ends so many tokens before its equal text does.
        watch: called with a namespace, the name of one of its chunks, and 1 for every new donor of the chunk, -1 for
            every one that goes; a flush of everything is not told.
    """

    def __init__(
        self,
        config: CoreConfig | None = None,
        *,
        lexicon: Lexicon | None = None,
        hash_function: HashFunction = xxh3_name,
        names: RowNames | None = None,
        row_lookahead: int = 0,
        watch: Callable[[Hashable, int, int], None] | None = None,
    ) -> None:
        self.names, self._row_lookahead, self._watch = names or RowNames(), row_lookahead, watch
        self.config = config or CoreConfig()
        self._lexicon = lexicon
        self._hash = hash_function
        self._chunker = Chunker(self.config, hash_function)
        self._size = TableSize()
        # Shrink by eviction, `forget` and `flush`; a namespace goes with its last path.
        self._ages: OrderedDict[int, Node] = OrderedDict()
        self._namespaces: dict[Hashable, _Namespace] = {}
        self._serials = itertools.count()
        self._num_tokens = self._num_namespace_bytes = 0
        self._num_evicted = 0
        self._num_work = 0
        # Emptied by whatever reads or changes the index.
        self._noted: deque[Callable[[], None]] = deque()
        self.is_whole = True
        """False after an exception in the middle of a change: only `flush()` helps."""

    def publish(
        self,
        namespace: Hashable,
        tokens: Tokens,
        computed: Sequence[Span],
        *,
        spliced: Sequence[Span] = (),
        approximate: Sequence[Span] = (),
        generations: Sequence[tuple[int, int]] = (),
        delimiters: frozenset[int] = frozenset(),
    ) -> None:
        """Note that the radix tree holds rows for `tokens`, a path from position 0.

        Args:
            namespace: nothing crosses it.
            tokens: the whole path; what is stored of it already is shared. The last `names.lookahead` have no rows.
            computed, spliced, approximate, generations: as in `Published`; positions in none keep what was known.
            delimiters: ids of the tokens that open or close a message; chunks do not reach across them.

        Where paths part in the middle of a name, each has rows of its own for the same tokens, and the trie one
        position for all of them: it is eligible as long as the rows of all these paths are.

        NOTE: whoever lets spliced rows into the tree must name them here before the next plan. Cost: one walk over the
        stored part, then O(new tokens).
        """
        self.note(namespace, tokens, Published(computed, spliced, approximate, generations), delimiters)
        self.settle()

    def note(
        self, namespace: Hashable, tokens: Tokens, rows: Published, delimiters: frozenset[int] = frozenset()
    ) -> None:
        """Publish later: at `settle`, or before anything else reads or changes the index. Cost O(1).

        An answer need not wait until its text is cut, and no plan can tell the difference. Arguments as of `publish`;
        none of them may change until then.
        """
        require_tokens(tokens)
        if len(tokens):
            self._noted.append(partial(self._publish, namespace, tokens, rows, delimiters))

    def settle(self) -> None:
        """Publish what was noted.

        Raises:
            Exception: a publication failed, and the index is not whole any more.
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
            # Rows of this path that the trie has known for those of others.
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
        resolve: Resolver,
        end: int | None = None,
        options: PlanOptions | None = None,
    ) -> Plan:
        """Plan `[prefix_len, end)` of a prompt.

        Args:
            namespace: only donors of this one are considered.
            tokens: the prompt.
            prefix_len: what the tree matched exactly.
            resolve: asked for every run before it is chosen. Where a path is shorter in the tree than here it is
                shortened here too, and another donor is tried.
            end: the prompt's length if it is not all of `tokens`.
            options: the request's own settings.

        Returns:
            Runs that are resident as far as `resolve` said, none before `sink_tokens`, none with the last token.
        """
        require_tokens(tokens)
        stop = len(tokens) if end is None else end
        if not 0 <= prefix_len <= stop <= len(tokens):
            raise ValueError(f"prefix_len={prefix_len!r}, end={end!r}: must lie in order inside {len(tokens)} tokens.")
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None or not space.donors.heads:
            return Plan(prefix_len=prefix_len, end=stop)
        options = options or _NO_LIMITS
        planner = Planner(
            options.policy or self.config,
            options,
            trie=space.trie,
            donors=space.donors,
            lexicon=self._lexicon,
            tokens=tokens[:stop],
            prefix_len=prefix_len,
            resolve=resolve,
            forget=self._forget,
            row_lookahead=self._row_lookahead,
        )
        plan = planner.plan()
        self._num_work += planner.work
        self._drop_if_empty(space)
        return plan

    def forget(self, namespace: Hashable, tokens: Tokens, resident_len: int) -> None:
        """Drop every path that agrees with `tokens` beyond `resident_len`: the tree no longer holds it there."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None:
            return
        node, stored = space.trie.walk(tokens)
        if stored > resident_len:
            self._forget(node, resident_len)
            self._drop_if_empty(space)

    def recheck_oldest(self, resident_len: Callable[[Hashable, Tokens], int]) -> bool:
        """Ask whether the path that was not used for longest is still resident, and forget what of it is not.

        Args:
            resident_len: how many leading tokens of a path the tree holds.

        Returns:
            Whether something was forgotten.
        """
        self.settle()
        oldest = next(iter(self._ages.values()), None)
        if oldest is None:
            return False
        space = self._namespaces[oldest.trie.namespace]
        resident = resident_len(space.trie.namespace, tokens_before(oldest, oldest.end, oldest.end))
        space.trie.touch([oldest])
        if resident == oldest.end:
            return False
        self._forget(oldest, resident)
        self._drop_if_empty(space)
        return True

    @property
    def num_tokens(self) -> int:
        """Tokens of all paths, as far as they are published."""
        return self._num_tokens

    def donor_names(self) -> dict[Hashable, list[int]]:
        """The name of each donor's chunk, by namespace. Cost O(donors)."""
        self.settle()
        return {namespace: space.donors.live_names() for namespace, space in self._namespaces.items()}

    def unknown(self, namespace: Hashable, tokens: Tokens, start: int, least: int) -> list[Span]:
        """The spans of `[start, len(tokens))` of `least` tokens and more in which no known chunk ends, by its ending.

        Cost O(tokens), .5 ns each and a look-up for every place where the filter says perhaps.
        """
        self.settle()
        space = self._namespaces.get(namespace)
        ends: list[int] = []
        if space is not None:
            known = space.donors.heads
            ends = [
                end
                for end, ending in zip(*space.donors.scan(tokens, start, len(tokens)), strict=True)
                if ending in known
            ]
        return [span for span in itertools.pairwise((start, *ends, len(tokens))) if span[1] - span[0] >= least]

    def exactness(self, namespace: Hashable, tokens: Tokens) -> Exactness:
        """What is known of the rows of a path. Cost: one walk over what is stored of it."""
        self.settle()
        space = self._namespaces.get(namespace)
        return Exactness(unknown_len=len(tokens)) if space is None else exactness_of(space.trie, tokens)

    def generation(self, namespace: Hashable, tokens: Tokens) -> int:
        """How many changed fields the rows at the end of a path have behind them, as far as is known."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None:
            return 0
        node, stored = space.trie.walk(tokens)
        return max((each.generation(min(each.end, stored)) for each in node.lineage()), default=0)

    def pin(self, namespace: Hashable, tokens: Tokens) -> None:
        """Let the donors on a published path be the last to leave for other donors of their chunks."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is None:
            return
        with self._changing():
            node, stored = space.trie.walk(tokens)
            if node.start < stored < node.end:
                self._split(space, node, stored)
                # The lower part is the youngest until its path is touched.
                space.trie.touch([node])
            for each in node.lineage():
                each.num_pins += 1

    def unpin(self, namespace: Hashable, tokens: Tokens) -> None:
        """Undo one `pin` of the path, as far as it is still stored."""
        self.settle()
        space = self._namespaces.get(namespace)
        if space is not None:
            for each in space.trie.walk(tokens)[0].lineage():
                each.num_pins = max(0, each.num_pins - 1)

    def flush(self, namespace: Hashable | None = None) -> None:
        """Forget one namespace, or all of them; all of them whatever state they are in."""
        if namespace is None:
            self._noted.clear()
            self._size, self._ages, self._namespaces = TableSize(), OrderedDict(), {}
            self._num_tokens = self._num_namespace_bytes = 0
            self.is_whole = True
            return
        self.settle()
        space = self._namespaces.get(namespace)
        if space is not None:
            for child in list(space.trie.root.children.values()):
                self._remove_subtree(child)
            self._drop_if_empty(space)

    def stats(self) -> IndexStats:
        """What the index holds. Cost O(nodes)."""
        self.settle()
        return IndexStats(
            num_tokens=self._num_tokens,
            num_bytes=self._num_bytes(),
            num_paths=sum(1 for node in self._ages.values() if not node.children),
            num_nodes=len(self._ages),
            num_endings=self._size.num_endings,
            num_donors=self._size.num_donors,
            num_namespaces=len(self._namespaces),
            num_evicted_tokens=self._num_evicted,
            num_work=self._num_work,
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self.is_whole = False
        yield
        self.is_whole = True

    def _space(self, namespace: Hashable) -> _Namespace:
        space = self._namespaces.get(namespace)
        if space is None:
            watch = None if self._watch is None else partial(self._watch, namespace)
            space = _Namespace(
                Trie(namespace, self._ages, self._serials),
                DonorTable(self.config.max_donors_per_chunk, self._hash, self._size, watch),
                _namespace_bytes(namespace),
            )
            self._namespaces[namespace] = space
            self._num_namespace_bytes += space.num_bytes
        return space

    def _store(self, space: _Namespace, tokens: Tokens) -> tuple[list[Node], int]:
        """The nodes of the path `tokens`, made where they are missing, and how many tokens were stored before."""
        node, stored = space.trie.walk(tokens)
        if stored < node.end:
            self._split(space, node, stored)
        if stored < len(tokens):
            node = space.trie.append(node, tokens[stored:])
            self._num_tokens += len(tokens) - stored
        return node.lineage(), stored

    def _split(self, space: _Namespace, node: Node, position: int) -> None:
        lower = space.trie.split(node, position)
        space.donors.move_below(node, lower)

    def _mark(self, space: _Namespace, path: list[Node], computed: list[Span], holes: list[Span]) -> list[Span]:
        """Update what is eligible along `path`; returns the spans that were not so before."""
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
        """Make donors of the chunks that end in `fresh` spans; growth stops where a chunk begins before eligibility."""
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
            endings = ending_hashes(tokens[cut_from:last])[ends - (ENDING_LEN + cut_from)]
            space.donors.add_all(path, starts, ends, names, endings)

    def _forget(self, node: Node, position: int) -> None:
        """Drop the path to `node` from `position` on, with everything below it."""
        while node.parent is not None and node.start >= position:
            parent = node.parent
            if parent.parent is None or parent.end <= position:
                break
            if len(parent.children) > 1 and self.names.parted(parent.end)[0] <= position:
                break  # What the other paths have there are rows of their own.
            node = parent
        if node.start < position and node.end <= position:
            return
        with self._changing():
            if node.start < position:
                self._split(self._namespaces[node.trie.namespace], node, position)
                (node,) = node.children.values()
            self._remove_subtree(node)

    def _remove_subtree(self, node: Node) -> None:
        order = [node]
        for each in order:
            order.extend(each.children.values())
        for each in reversed(order):
            self._remove_leaf(each)

    def _remove_leaf(self, node: Node) -> None:
        self._namespaces[node.trie.namespace].donors.remove_all(node)
        node.trie.remove(node)
        self._num_tokens -= len(node.tokens)

    def _num_bytes(self) -> int:
        """Estimate of everything that is kept. Cost O(1)."""
        return (
            TOKEN_BYTES * self._num_tokens
            + _NODE_BYTES * len(self._ages)
            + _DONOR_BYTES * self._size.num_donors
            + _ENDING_BYTES * self._size.num_endings
            + self._num_namespace_bytes
            + self._size.num_filter_slots
        )

    def _evict(self) -> None:
        config = self.config
        while self._num_tokens > config.max_index_tokens or self._num_bytes() > config.max_index_bytes:
            oldest = next(iter(self._ages.values()), None)
            if oldest is None:
                break
            self._num_evicted += len(oldest.tokens)
            space = self._namespaces[oldest.trie.namespace]
            self._remove_leaf(oldest)
            self._drop_if_empty(space)

    def _drop_if_empty(self, space: _Namespace) -> None:
        if not space.trie.root.children and self._namespaces.pop(space.trie.namespace, None) is not None:
            space.donors.close()
            self._num_namespace_bytes -= space.num_bytes


def _namespace_bytes(namespace: Hashable) -> int:
    """What a namespace takes beside its paths: clients choose how long its parts are."""
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
    """The node of `path` that holds the token before `end`."""
    return path[bisect_left(path, end, 0, len(path) - 1, key=_END)]
