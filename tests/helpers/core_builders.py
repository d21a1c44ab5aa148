"""Texts, indexes and plans for tests of the core."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from sglang_pic.core import (
    MOST_REUSE,
    ContentIndex,
    CoreConfig,
    Path,
    Plan,
    PlanOptions,
    PositionSteps,
    RowSource,
    Span,
    Tokens,
    as_tokens,
)
from sglang_pic.core.published import Published

Row = tuple[object, bytes, int]
Resolve = Callable[[Path, int], int]

DELIMITERS = frozenset({1})
CLOSE = as_tokens([1])


def text(seed: int, length: int) -> Tokens:
    """Random tokens without delimiters: the same for the same seed."""
    return as_tokens(np.random.default_rng(seed).integers(3, 50_000, length))


def join(*parts: Tokens) -> Tokens:
    """One text of several."""
    return np.concatenate(parts)


def all_resident(path: Path, end: int) -> int:
    """Resolves as a tree that evicts nothing."""
    return end


def asking(*, compute_from: int | None = None, **policy: int) -> PlanOptions:
    """The settings for most reuse with these instead."""
    return PlanOptions(policy=msgspec.structs.replace(MOST_REUSE, **policy), compute_from=compute_from)


def index_of(*paths: Tokens, config: CoreConfig = MOST_REUSE) -> ContentIndex:
    """An index in which each of the paths was computed whole."""
    index = ContentIndex(config)
    for path in paths:
        publish(index, path)
    return index


def publish_rows(
    index: ContentIndex,
    namespace: Hashable,
    tokens: Tokens,
    *rows: Sequence[Span],
    delimiters: frozenset[int] = frozenset(),
    **more: Any,
) -> None:
    """Publish at once; `rows` and `more` are the fields of `Published`."""
    index.note(namespace, tokens, Published(*rows, **more), delimiters)
    index.settle()


def publish(index: ContentIndex, *parts: Tokens, namespace: object = "a") -> None:
    """A request that computed all of its prompt."""
    tokens = join(*parts)
    publish_rows(index, namespace, tokens, [(0, len(tokens))], delimiters=DELIMITERS)


def plan_of(
    index: ContentIndex,
    *parts: Tokens,
    namespace: object = "a",
    resolve: Resolve = all_resident,
    pinned: int = 0,
    steps: Sequence[PositionSteps] = (),
    whole: Sequence[Span] = (),
    **how: Any,
) -> Plan:
    """A plan, each run of which is proved equal to its donor token by token."""
    prompt = join(*parts)

    class Rows(RowSource):
        def num_resident(self, path: Path, end: int) -> int:
            assert path.namespace == namespace, "no path of another namespace is even asked for"
            return resolve(path, end)

        def pinned_len(self, path: Path) -> int:
            return min(pinned, len(path))

    plan = index.plan(namespace, prompt, rows=Rows(steps=steps, whole=whole), **{"prefix_len": 0, **how})
    at = plan.prefix_len
    for run in plan.runs:
        assert at <= run.target_start < run.target_end < len(prompt)
        donor = run.donor.tokens(run.donor_end)[run.donor_start :]
        assert np.array_equal(donor, prompt[run.target_start : run.target_end])
        at = run.target_end
    return plan


def serve(index: ContentIndex, *parts: Tokens, namespace: object = "a") -> Plan:
    """Plan, then publish as a request does: what it spliced is no donor."""
    plan = plan_of(index, *parts, namespace=namespace)
    publish_rows(index, namespace, join(*parts), plan.gaps, spliced=spans(plan), delimiters=DELIMITERS)
    return plan


def spans(plan: Plan) -> list[Span]:
    """What is spliced."""
    return [(run.target_start, run.target_end) for run in plan.runs]


def donor_spans(plan: Plan) -> list[Span]:
    """What is read."""
    return [(run.donor_start, run.donor_end) for run in plan.runs]


class Rows:
    """A radix tree that forgets what it is told to: which rows it has by path, and whether each was computed there."""

    def __init__(self) -> None:
        self.computed: dict[Row, bool] = {}

    def name(self, namespace: object, path: Tokens, position: int) -> Row:
        """What the tree tells the row at a position of a path by."""
        return namespace, path[: position + 1].tobytes(), position

    def resident(self, namespace: object, path: Tokens) -> int:
        """How many leading rows of a path there are."""
        return next(end for end in range(len(path) + 1) if self.name(namespace, path, end) not in self.computed)

    def insert(self, namespace: object, path: Tokens, computed: list[Span], spliced: list[Span]) -> None:
        """All rows of a path; what is in no span was inserted by a request that tells nobody, and is exact."""
        moved = {position for a, b in spliced for position in range(a, b)}
        told = moved | {position for a, b in computed for position in range(a, b)}
        for position in range(len(path)):
            row = self.name(namespace, path, position)
            if position in told:
                self.computed[row] = position not in moved
            else:
                self.computed.setdefault(row, True)

    def evict(self, namespace: object, path: Tokens, length: int) -> None:
        """Everything that goes on from the first `length` rows of a path."""
        stem = self.name(namespace, path, length)[1]
        for row in list(self.computed):
            if row[0] == namespace and row[2] >= length and row[1].startswith(stem):
                del self.computed[row]


# Random texts are no edits of each other; the guard has tests of its own.
CONFIG = CoreConfig(
    edit="in_place", sink_tokens=8, seam_tokens=1, tail_tokens=0, min_run_tokens=6, max_donors_per_chunk=3
)


def sizes_of(index: ContentIndex) -> list[int]:
    """All that an index counts."""
    counted = index.num_tokens, index.num_bytes, index.num_evicted_tokens, index.num_work
    return [*counted, *dataclasses.astuple(index.size), len(index._ages), len(index._namespaces)]


def rows_of(index: ContentIndex) -> dict[Row, tuple[bool, frozenset[tuple[int, int, int]]]]:
    """What an index knows of each row: whether it is eligible, and the donors that end with it."""
    rows: dict[Row, tuple[bool, frozenset[tuple[int, int, int]]]] = {}
    for namespace, space in index._namespaces.items():
        table, todo = space.donors, [(child, b"") for child in space.trie.root.children.values()]
        for node, stem in todo:
            path = stem + node.tokens.tobytes()
            todo += [(child, path) for child in node.children.values()]
            donors: dict[int, set[tuple[int, int, int]]] = {}
            for donor in node.donors:
                told = (table.endings[donor], table.names[donor], table.starts[donor])
                donors.setdefault(table.end(donor), set()).add(told)
            for end in range(node.start + 1, node.end + 1):
                known = node.eligible_around(end - 1) is not None, frozenset(donors.get(end, ()))
                rows[namespace, path[: 4 * end], end - 1] = known
    return rows
