"""The index and the planner against a model that knows every row of every path.

The model names a row by its namespace and its whole path, as the radix tree does, and remembers whether the row that
the tree holds there was computed at its place or came from a splice. Whatever a plan reads must be such a row.
"""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pic_bench.probe_plugin.invariants import check

from sglang_pic.core import MOST_REUSE, ContentIndex, CoreConfig, Path, RowSource, Span, Tokens, as_tokens, donors
from sglang_pic.core.chunker import xxh3_name
from sglang_pic.core.plan import CostModel, DropReason, Plan, PlanOptions, Run
from sglang_pic.core.tokens import common_len, common_suffix_len
from tests.helpers.core_builders import (
    CONFIG,
    Rows,
    donor_spans,
    index_of,
    join,
    plan_of,
    publish,
    publish_rows,
    rows_of,
    sizes_of,
    spans,
    text,
)

DELIMITERS = frozenset({1, 2})

RNG = np.random.default_rng(7)
SOURCES = [
    as_tokens(RNG.integers(3, 50_000, 300)),
    # Whatever an int32 can hold.
    as_tokens([-(2**31), 2**31 - 1, -1, 0, *RNG.integers(-(2**31), 2**31, 296)]),
    as_tokens(np.full(200, 5)),
    as_tokens([6, 7, 8] * 70),
    as_tokens([1, *RNG.integers(3, 50_000, 30), 2] * 6),
]

# Round bounds often, so that prompts share beginnings and ends.
pieces = st.tuples(
    st.integers(0, len(SOURCES) - 1),
    st.sampled_from([0, 50, 100]) | st.integers(0, 150),
    st.sampled_from([60, 100, 160]) | st.integers(1, 160),
).map(lambda piece: SOURCES[piece[0]][piece[1] : piece[1] + piece[2]])
prompts = st.lists(pieces, min_size=1, max_size=4).map(np.concatenate)
namespaces = st.sampled_from(["a", "b", ("a", None)])
SIZES = {"seam_tokens": (0, 4), "min_run_tokens": (1, 40), "min_spliced_tokens": (1, 100), "tail_tokens": (0, 120)}
COSTS = {
    "gap_us": [0.0, 10.0, 60.0],
    "gap_context_us": [0.0, 0.1],
    "request_us": [0.0, 100.0],
    "floor_us": [0.0, 200.0],
    "gap_floor_us": [0.0, 300.0],
}
policies = {name: st.integers(*bounds) for name, bounds in SIZES.items()}
policies["reordered"] = st.sampled_from(["compute", "splice"])
costs = {name: st.sampled_from(choices) for name, choices in COSTS.items()}
options = st.builds(
    PlanOptions,
    policy=st.none() | st.builds(partial(msgspec.structs.replace, CONFIG), **policies),
    max_runs=st.none() | st.integers(0, 3),
    max_gaps=st.none() | st.integers(1, 4),
    compute_from=st.none() | st.integers(0, 500),
    cost=st.none() | st.builds(partial(CostModel, computed_token_us=1.5, spliced_token_us=0.5), **costs),
    num_before=st.sampled_from([0, 0, 150]),
)


class IndexMachine(RuleBasedStateMachine):
    """Random publications, plans, evictions and flushes; two indexes fed the same must stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Rows()
        self.past: list[tuple[object, Tokens]] = []
        self.indexes: list[ContentIndex] = []

    @initialize(
        weak=st.booleans(),
        max_index_tokens=st.sampled_from([1_500, 1_500, 1_500, 300, 50, 7]),
        max_index_bytes=st.sampled_from([1 << 16, 1 << 28]),
    )
    def start(self, weak: bool, max_index_tokens: int, max_index_bytes: int) -> None:
        def weak_name(data: memoryview) -> int:
            return xxh3_name(data) % 5

        config = msgspec.structs.replace(CONFIG, max_index_tokens=max_index_tokens, max_index_bytes=max_index_bytes)
        self.indexes = [ContentIndex(config, hash_function=weak_name if weak else xxh3_name) for _ in range(2)]

    @rule(data=st.data(), chosen=options, ignore_prefix=st.booleans())
    def serve(self, data: st.DataObject, chosen: PlanOptions, ignore_prefix: bool) -> None:
        """A request as the adapter serves it: match, plan, insert, publish what the tree adopted."""
        namespace, tokens = self._prompt(data)
        matched = min(self.tree.resident(namespace, tokens), len(tokens) - 1)
        prefix_len = 0 if ignore_prefix else matched
        plan = self._plan(namespace, tokens, prefix_len, len(tokens), chosen)
        # What the tree held already stays as it was published.
        adopted_from = self.tree.resident(namespace, tokens)
        spliced = [(max(run.target_start, adopted_from), run.target_end) for run in plan.runs]
        spliced = [span for span in spliced if span[0] < span[1]]
        computed = [(max(a, adopted_from), b) for a, b in plan.gaps if b > adopted_from]
        self.tree.insert(namespace, tokens, computed, spliced)
        for index in self.indexes:
            publish_rows(index, namespace, tokens, computed, spliced=spliced, delimiters=DELIMITERS)
        self.past.append((namespace, tokens))

    @rule(data=st.data(), chosen=options, page_size=st.sampled_from([1, 1, 4, 16]))
    def plan_any_part(self, data: st.DataObject, chosen: PlanOptions, page_size: int) -> None:
        """A plan that is thrown away: nothing changes but ages, and what turned out to be gone."""
        namespace, tokens = self._prompt(data)
        end = data.draw(st.integers(0, len(tokens)))
        prefix_len = data.draw(st.integers(0, end))
        before = rows_of(self.indexes[0])
        plan = self._plan(namespace, tokens, prefix_len, end, chosen, page_size)
        after = rows_of(self.indexes[0])
        assert all(before[row] == known for row, known in after.items())
        if DropReason.DONOR_EVICTED not in plan.dropped:
            assert after == before
        elif page_size == 1:
            assert not before.keys() - after.keys() & self.tree.computed.keys(), "what was dropped had gone"

    @rule(data=st.data(), spans=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300))))
    def publish_any_spans(self, data: st.DataObject, spans: list[Span]) -> None:
        namespace, tokens = self._prompt(data)
        computed, spliced = spans[::2], [(a, min(b, len(tokens))) for a, b in spans[1::2]]
        self.tree.insert(namespace, tokens, [(a, min(b, len(tokens))) for a, b in computed], spliced)
        for index in self.indexes:
            publish_rows(index, namespace, tokens, computed, spliced=spliced, delimiters=DELIMITERS)
        self.past.append((namespace, tokens))

    @rule(data=st.data())
    def evict_from_the_tree(self, data: st.DataObject) -> None:
        """The tree forgets without telling: the index finds out when it resolves."""
        if self.past:
            namespace, tokens = data.draw(st.sampled_from(self.past))
            length = data.draw(st.integers(0, len(tokens) - 1))
            self.tree.evict(namespace, tokens, length)

    @rule()
    def flush(self) -> None:
        for index in self.indexes:
            index.flush()
            assert rows_of(index) == {}
            assert index.num_bytes == 0

    @invariant()
    def both_hold_the_same_and_are_sound(self) -> None:
        for index in self.indexes:
            check(index)
        if self.indexes:
            assert sizes_of(self.indexes[0]) == sizes_of(self.indexes[1])
            assert list(self.indexes[0]._ages) == list(self.indexes[1]._ages)

    def _prompt(self, data: st.DataObject) -> tuple[object, Tokens]:
        """A path of before, one that branches off it, or another one."""
        if not self.past or data.draw(st.booleans()):
            return data.draw(namespaces), data.draw(prompts)
        namespace, tokens = data.draw(st.sampled_from(self.past))
        if data.draw(st.booleans()):
            return namespace, tokens
        return namespace, join(tokens[: data.draw(st.integers(0, len(tokens)))], data.draw(pieces))

    def _plan(
        self, namespace: object, tokens: Tokens, prefix_len: int, end: int, chosen: PlanOptions, page_size: int = 1
    ) -> Plan:
        """The same plan of both indexes, checked."""
        resolved: dict[Path, int] = {}

        def resolve(path: Path, end: int) -> int:
            assert path.namespace == namespace
            resident = self.tree.resident(namespace, path.tokens(end))
            resolved[path] = max(resolved.get(path, 0), resident - resident % page_size)
            return resident - resident % page_size

        plans = [
            plan_of(index, tokens[:end], prefix_len=prefix_len, options=chosen, resolve=resolve, namespace=namespace)
            for index in self.indexes
        ]
        assert plans[0] == plans[1]
        assert (plans[0].prefix_len, plans[0].end) == (prefix_len, end)
        self._check_plan(namespace, tokens[:end], plans[0], chosen)
        assert all(run.donor_end <= resolved[run.donor] for run in plans[0].runs)
        return plans[0]

    def _check_plan(self, namespace: object, tokens: Tokens, plan: Plan, chosen: PlanOptions) -> None:
        covered = sorted([*plan.gaps, *((run.target_start, run.target_end) for run in plan.runs)])
        assert [p for a, b in covered for p in range(a, b)] == list(range(plan.prefix_len, len(tokens)))
        assert plan.prefix_len == len(tokens) or plan.gaps[-1][1] == len(tokens), "the last token is computed"
        assert chosen.compute_from is None or all(run.target_end <= chosen.compute_from for run in plan.runs)
        if chosen.cost is not None and plan.runs:
            saved_us = chosen.cost.request_saves(plan.gaps, spans(plan), num_before=chosen.num_before)
            assert saved_us > 0
        assert chosen.max_runs is None or len(plan.runs) <= chosen.max_runs
        assert chosen.max_gaps is None or len(plan.gaps) <= chosen.max_gaps
        last = len(tokens) if chosen.compute_from is None else min(len(tokens), chosen.compute_from + 1)
        use = chosen.policy or CONFIG
        tail = last - use.tail_tokens
        at = plan.prefix_len
        for run in plan.runs:
            assert self._num_equal(namespace, tokens, run) >= use.min_run_tokens
            assert run.num_tokens >= use.min_spliced_tokens
            assert min(run.target_start, run.donor_start) >= CONFIG.sink_tokens
            donor = run.donor.tokens(run.donor_end)
            assert donor[run.donor_start :].tolist() == tokens[run.target_start : run.target_end].tolist()
            for end in range(run.donor_start + 1, run.donor_end + 1):
                row = namespace, donor[:end].tobytes(), end - 1
                assert self.tree.computed[row], "a donor's rows were computed in place"
            is_exact = run.shift == 0 and donor.tolist() == tokens[: run.donor_end].tolist()
            has_context = common_suffix_len(donor[: run.donor_start], tokens[: run.target_start]) >= 16
            assert run.seam_len == (0 if is_exact or (has_context and run.target_start == at) else use.seam_tokens)
            assert run.target_end <= tail or is_exact
            assert run.target_start - run.seam_len >= at, "a seam lies in the gap before its run"
            at = run.target_end

    def _num_equal(self, namespace: object, tokens: Tokens, run: Run) -> int:
        """Length of the equal span around a run, on any path that was ever published under the donor's."""
        stem = run.donor.tokens(run.donor_end)
        before = common_suffix_len(stem, tokens[: run.target_end])
        paths = [path for space, path in self.past if space == namespace and common_len(path, stem) == len(stem)]
        return before + max(common_len(path[len(stem) :], tokens[run.target_end :]) for path in paths)


@pytest.fixture(autouse=True)
def _numbers_are_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of these sizes would keep the numbers of all donors that have gone."""
    monkeypatch.setattr(donors, "_MIN_FREE", 0)


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestIndex = IndexMachine.TestCase


def test_rows_that_a_splice_replaced_are_donors_no_more() -> None:
    """The tree evicted a path and holds it again, part of it spliced: its neighbours must not grow into that part."""
    path = text(0, 1_000)
    index = index_of(path)
    num_donors = index.size.num_donors
    publish_rows(index, "a", path[:700], [], spliced=[(400, 600)])
    assert 0 < index.size.num_donors < num_donors
    check(index)
    prompt = join(text(1, 50), path[100:], text(2, 9))
    assert donor_spans(plan_of(index, prompt)) == [(101, 400), (601, 1_000)]
    # Computed once more at their place they are donors again.
    publish_rows(index, "a", path, [(350, 650)])
    assert donor_spans(plan_of(index, prompt)) == [(101, 1_000)]


def test_what_is_exact_of_a_path_is_known() -> None:
    path = text(0, 300)
    index = ContentIndex(MOST_REUSE)
    publish_rows(index, "a", path, [(0, 100), (200, 300)], spliced=[(100, 200)], approximate=[(100, 300)])
    sibling = join(path[:250], text(1, 50))
    publish(index, sibling[:150])
    publish_rows(index, "a", sibling, [(250, 300)], approximate=[(250, 300)])
    check(index)
    # The first path of 150 tokens was computed whole, as after an eviction; what stands behind was not.
    assert index.exactness("a", path[:150]) == (150, 0, 0)
    assert index.exactness("a", path) == index.exactness("a", sibling) == (150, 0, 150)
    publish_rows(index, "a", path[:250], [(150, 250)])
    assert index.exactness("a", path) == index.exactness("a", sibling) == (250, 0, 50)
    publish_rows(index, "a", path, [(250, 300)])
    assert index.exactness("a", join(path, text(2, 9))) == (300, 9, 0), "of the rest nothing is known"
    publish_rows(index, "a", join(path, text(2, 9), text(3, 5)), [(309, 314)])
    assert index.exactness("a", join(path, text(2, 9), text(3, 5))) == (300, 14, 0), "nor of what stands behind"
    assert index.exactness("b", path) == (0, 300, 0)


def test_one_long_donor_wins_over_many_short_ones() -> None:
    body = text(0, 1_000)
    index = index_of(join(text(1, 100), body))
    for i in range(10):
        publish(index, text(10 + i, 77), body[100 * i : 100 * i + 100])
    assert spans(plan_of(index, text(2, 50), body, text(3, 9))) == [(51, 1_050)]


def test_of_equal_donors_the_one_with_the_same_context_wins() -> None:
    body, context = text(0, 300), text(1, 40)
    tool, other = as_tokens([50_001]), as_tokens([50_002])
    index = ContentIndex(MOST_REUSE)
    # The context is not eligible itself: it may only speak for the donor that follows it.
    right = join(text(2, 100), context, tool, body, text(3, 30))
    publish_rows(index, "a", right, [(140, len(right))])
    publish(index, text(4, 100), other, tool, body, text(5, 30))
    (run,) = plan_of(index, text(6, 90), context, tool, body, text(7, 30)).runs
    assert run.donor.tokens().tolist() == right.tolist()


def test_of_equal_donors_the_freshest_wins_and_the_next_one_serves_when_it_has_gone() -> None:
    body = text(0, 300)
    index = ContentIndex(MOST_REUSE)
    paths = [join(text(1 + i, 80 + i), body) for i in range(3)]
    for path in paths:
        publish(index, path)
    prompt = join(text(9, 70), body, text(10, 9))
    (run,) = plan_of(index, prompt).runs
    assert run.donor.tokens().tolist() == paths[2].tolist()

    def only_the_first(path: Path, end: int) -> int:
        return end if len(path) == len(paths[0]) else 0

    plan = plan_of(index, prompt, resolve=only_the_first)
    assert [run.donor.tokens().tolist() for run in plan.runs] == [paths[0].tolist()]
    assert {reason.value: count for reason, count in plan.dropped.items()} == {"donor_evicted": 2}
    assert sum(not node.children for node in index._ages.values()) == 1
    check(index)


@pytest.mark.parametrize(
    ("start", "end"), [(99, 250), (100, 250), (120, 199), (120, 200), (120, 201), (0, 1), (199, 201)]
)
def test_what_is_computed_later_is_eligible_to_the_token(start: int, end: int) -> None:
    """Spans that begin or end with the first or last token of a node."""
    index = ContentIndex(CoreConfig(edit="in_place", seam_tokens=1, tail_tokens=0, sink_tokens=0))
    path = text(0, 300)
    for stored in (100, 200, 300):
        publish_rows(index, "a", path[:stored], [])
    publish_rows(index, "a", path, [(start, end)])
    check(index)
    eligible = sorted(span for node in index._ages.values() for span in node.eligible)
    assert [p for a, b in eligible for p in range(a, b)] == list(range(start, end))
    publish_rows(index, "a", path, [], spliced=[(start, end)])
    assert not any(node.eligible for node in index._ages.values())


def test_eviction_takes_the_least_recently_used_leaves_first() -> None:
    index = ContentIndex(CoreConfig(edit="in_place", seam_tokens=1, tail_tokens=0, max_index_tokens=1_000))
    trunk = text(0, 400)
    branches = [join(trunk, text(i + 1, 200)) for i in range(5)]
    for branch in branches[:3]:
        publish(index, branch)
    assert plan_of(index, text(50, 40), branches[0][400:], text(51, 5)).runs, "branch 0 becomes the youngest"
    publish(index, branches[3])
    assert index.num_tokens == 1_000
    assert index.num_evicted_tokens == 200
    found = [bool(plan_of(index, text(52, 40), b[400:], text(53, 5)).runs) for b in branches[:4]]
    assert found == [True, False, True, True]
    publish(index, text(60, 1_000))
    assert index.num_tokens == 1_000, "a path that just fits stays, alone"
    publish(index, text(61, 1_001))
    assert index.num_tokens == len(index._namespaces) == 0, "a path that does not fit at all goes"
    check(index)


def test_how_long_clients_name_their_namespaces_counts() -> None:
    index = ContentIndex(CoreConfig(max_index_bytes=1 << 20))
    for number in range(30):
        publish_rows(index, (None, f"{number:010}" + "s" * 50_000), text(number, 100), [(0, 100)])
    assert len(index._namespaces) == 5
    assert 1_000_000 < index.num_bytes <= 1 << 20
    index.flush()
    assert index.num_bytes == 0


@pytest.mark.parametrize("prefix_len", [-1, 11])
def test_a_prefix_outside_the_prompt_is_refused(prefix_len: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 10\]"):
        ContentIndex(MOST_REUSE).plan("a", text(0, 10), prefix_len=prefix_len, rows=RowSource())


def test_donors_of_a_pinned_path_are_the_last_to_leave() -> None:
    block = text(1, 200)
    pinned = join(text(2, 60), block)
    index = index_of(pinned)
    index.pin("a", pinned)
    for seed in range(3, 12):
        publish(index, text(seed, 70), block)
        check(index)

    def is_served() -> bool:
        """Whether the pinned path is a donor where no other one is resident."""
        prompt = join(text(99, 90), block, text(98, 9))

        def resolve(path: Path, end: int) -> int:
            return end if path.tokens(60).tolist() == pinned[:60].tolist() else 0

        return bool(plan_of(index, prompt, resolve=resolve).runs)

    assert is_served()
    index.unpin("a", pinned)
    for seed in range(20, 32):
        publish(index, text(seed, 70), block)
    assert not is_served()
    assert all(not node.num_pins for node in index._ages.values())
