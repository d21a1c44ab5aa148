"""Ending hashes, the filter over them, and the donor table, against plain models."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_pic.core import Tokens, as_tokens
from sglang_pic.core.donors import DonorTable, TableSize
from sglang_pic.core.ending_filter import ENDING_LEN, EndingFilter, ending_hashes
from sglang_pic.core.trie import Node, Trie

MASK = 2**32 - 1
MAX_PER_ENDING = 32

token_ids = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3)


def tokens_of(min_size: int, max_size: int) -> st.SearchStrategy[Tokens]:
    return st.lists(token_ids, min_size=min_size, max_size=max_size).map(as_tokens)


def naive_ending(window: list[int]) -> int:
    """The formula as one weighted sum: token `j` is scaled by the step of every span in whose first half it lies."""
    total = 0
    for j, token in enumerate(window):
        mixed = (token & MASK) * 0x9E3779B1 & MASK
        mixed ^= mixed >> 15
        for half, step in ((1, 0x85EBCA77), (2, 0xC2B2AE3D), (4, 0x27D4EB2F)):
            if not j & half:
                mixed = mixed * step & MASK
        total += mixed
    total = total * 0x165667B1 & MASK
    return total ^ total >> 16


@given(tokens_of(0, 40))
def test_ending_hashes_are_those_of_every_window(tokens: Tokens) -> None:
    ids = tokens.tolist()
    windows = [ids[i : i + ENDING_LEN] for i in range(len(ids) - ENDING_LEN + 1)]
    hashes = ending_hashes(tokens)
    assert hashes.dtype == np.uint32
    assert hashes.tolist() == [naive_ending(window) for window in windows]
    assert tokens.tolist() == ids, "the input is left as it is"


@given(tokens_of(ENDING_LEN, ENDING_LEN), st.integers(0, ENDING_LEN - 1), token_ids)
def test_an_ending_hash_tells_one_changed_token_for_certain(window: Tokens, at: int, token: int) -> None:
    """Every step is a bijection of the changed token: not a matter of chance."""
    changed = window.copy()
    changed[at] = token
    assert (ending_hashes(changed)[0] == ending_hashes(window)[0]) == (token == window[at])


def test_similar_text_has_different_endings() -> None:
    """Counted ids, two tokens in all orders, periods: what a weak hash would merge."""
    windows = {tuple(range(i, i + ENDING_LEN)) for i in range(20_000)}
    windows |= {tuple((i >> bit & 1) + 5 for bit in range(ENDING_LEN)) for i in range(256)}
    windows |= {(i, j) * 4 for i in range(100) for j in range(100)}
    windows |= {(0,) * at + (i,) + (0,) * (ENDING_LEN - 1 - at) for at in range(ENDING_LEN) for i in range(1, 1_000)}
    tokens = np.array(sorted(windows), dtype="<i4")
    hashes = {int(ending_hashes(window)[0]) for window in tokens}
    # By chance about n^2 / 2^33 pairs collide.
    assert len(windows) - len(hashes) <= 3


@pytest.mark.parametrize("num_endings", [1, 63, 64, 65, 1_000, 50_000])
def test_the_rate_of_false_positives_is_bounded(num_endings: int) -> None:
    """At random endings, and at those of text that the filter has not seen."""
    rng = np.random.default_rng(num_endings)
    endings = rng.integers(0, MASK, num_endings, dtype=np.uint32)
    found = EndingFilter()
    found.rebuild(endings)
    text = ending_hashes(as_tokens(rng.integers(3, 50_000, 100_000)))
    for hashes in (text, rng.integers(0, MASK, 100_000, dtype=np.uint32)):
        assert len(found.candidates(hashes)) / len(hashes) <= 1 / 32 + 0.002
    assert found.candidates(endings).tolist() == list(range(num_endings))


class Place(NamedTuple):
    """A donor, as the model remembers it."""

    name: int
    node: Node
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


SEGMENT_LEN = 90
TEXT = as_tokens(np.random.default_rng(5).integers(0, 3, 120))
DATA = TEXT.data.cast("B")


def weak_name(data: memoryview) -> int:
    return sum(data) % 3


class TableMachine(RuleBasedStateMachine):
    """Two tables that share a size, against lists in plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.size = TableSize()
        ages: OrderedDict[int, Node] = OrderedDict()
        self.tries = [Trie(i, ages, iter(range(10_000 * i, 10_000 * i + 9_999))) for i in range(2)]
        self.tables = [DonorTable(max_per_name=3, hash_function=weak_name, size=self.size) for _ in range(2)]
        self.nodes: list[list[Node]] = [[], []]
        self.models: list[dict[int, list[Place]]] = [{}, {}]
        for which in range(2):
            self._grow(which)

    def teardown(self) -> None:
        for table, nodes in zip(self.tables, self.nodes, strict=True):
            for node in nodes:
                table.remove_all(node)
            table.close()
        assert self.size == TableSize(), "a closed table leaves nothing in the size"

    @rule(
        which=st.integers(0, 1),
        chunks=st.lists(
            st.tuples(
                st.integers(0, 3) | st.integers(0, MASK),
                st.integers(0, 1),
                st.integers(0, 10),
                st.integers(0, SEGMENT_LEN - 1),
                st.integers(ENDING_LEN, 64),
            ),
            max_size=8,
        ),
    )
    def add(self, which: int, chunks: list[tuple[int, int, int, int, int]]) -> None:
        for ending, name, number, last, length in chunks:
            node = self.nodes[which][number % len(self.nodes[which])]
            end = node.start + 1 + last % len(node.tokens)
            self._add(which, ending, Place(name, node, max(0, end - length), min(end, length)))

    @rule(which=st.integers(0, 1), ending=st.integers(0, 3), first=st.integers(0, 1_000), num=st.integers(20, 40))
    def add_many_names_to_an_ending(self, which: int, ending: int, first: int, num: int) -> None:
        node = self.nodes[which][-1]
        for name in range(first, first + num):
            self._add(which, ending, Place(name, node, max(0, node.end - ENDING_LEN), ENDING_LEN))

    @rule(which=st.integers(0, 1), seed=st.integers(0, 99), num=st.integers(0, 400))
    def add_many_endings(self, which: int, seed: int, num: int) -> None:
        node = self.nodes[which][0]
        for ending in np.random.default_rng(seed).integers(0, MASK, num).tolist():
            self._add(which, ending, Place(7, node, max(0, node.end - ENDING_LEN), ENDING_LEN))

    @rule(which=st.integers(0, 1), chosen=st.lists(st.integers(0, 10_000), max_size=40))
    def remove(self, which: int, chosen: list[int]) -> None:
        table, model = self.tables[which], self.models[which]
        for number in chosen:
            if not model:
                return
            ending = sorted(model)[number % len(model)]
            donors = table.of(ending)
            at = number % len(donors)
            table.remove(donors[at])
            del model[ending][at]
            if not model[ending]:
                del model[ending]

    @precondition(lambda self: any(len(nodes) > 1 for nodes in self.nodes))
    @rule(number=st.integers(0, 100))
    def remove_all_of_a_node(self, number: int) -> None:
        which = max(range(2), key=lambda i: len(self.nodes[i]))
        node = self.nodes[which].pop(number % len(self.nodes[which]))
        self.tables[which].remove_all(node)
        assert not node.donors
        model = self.models[which]
        for ending in list(model):
            model[ending] = [place for place in model[ending] if place.node is not node]
            if not model[ending]:
                del model[ending]

    @rule(which=st.integers(0, 1), number=st.integers(0, 100), at=st.integers(1, SEGMENT_LEN - 1))
    def split(self, which: int, number: int, at: int) -> None:
        upper = self.nodes[which][number % len(self.nodes[which])]
        if len(upper.tokens) < 2:
            return
        lower = self.tries[which].split(upper, upper.start + 1 + at % (len(upper.tokens) - 1))
        self.tables[which].move_below(upper, lower)
        self.nodes[which].append(lower)
        for places in self.models[which].values():
            places[:] = [
                place._replace(node=lower) if place.node is upper and place.end > lower.start else place
                for place in places
            ]

    @rule(which=st.integers(0, 1))
    def grow(self, which: int) -> None:
        self._grow(which)

    @invariant()
    def lists_are_those_of_the_model(self) -> None:
        for table, model in zip(self.tables, self.models, strict=True):
            assert set(table.heads) == set(model)
            for ending, places in model.items():
                donors = table.of(ending)
                assert [self._place(table, donor) for donor in donors] == places
                assert [table.end(donor) for donor in donors] == [place.end for place in places]
                assert len(table.filter.candidates(np.array([ending], np.uint32)))
            assert len(table) == sum(map(len, model.values()))

    @invariant()
    def nodes_know_their_donors(self) -> None:
        for which, table in enumerate(self.tables):
            held = {donor for node in self.nodes[which] for donor in node.donors}
            assert held == {donor for ending in table.heads for donor in table.of(ending)}
            for node in self.nodes[which]:
                assert len(set(node.donors)) == len(node.donors)
                assert all(table.nodes[donor] is node for donor in node.donors)

    @invariant()
    def sizes_add_up(self) -> None:
        assert self.size.num_donors == sum(map(len, self.tables))
        assert self.size.num_endings == sum(map(len, self.models))
        assert self.size.num_filter_slots == sum(table.filter.num_slots for table in self.tables)

    @invariant()
    def filters_say_yes_seldom_by_chance_and_are_as_large_as_they_need(self) -> None:
        """Of all slots, each asked once, at most one in 16 is taken: so likely is a yes to a random ending."""
        for table in self.tables:
            num_slots = table.filter.num_slots
            hashes = (np.arange(num_slots, dtype=np.uint64) * (2**32 // num_slots)).astype(np.uint32)
            assert len(table.filter.candidates(hashes)) <= num_slots / 16
            assert 1 << 10 <= num_slots <= max(1 << 10, 64 * (2 * len(table.heads) + 64))

    @rule(which=st.integers(0, 1), end=st.integers(0, len(TEXT)))
    def look_up(self, which: int, end: int) -> None:
        for ending in [*self.models[which], 12_345]:
            donors, num_named = self.tables[which].ending_at(ending, DATA, end)
            places = [place for place in self.models[which].get(ending, []) if place.length <= end]
            equal = [p for p in places if weak_name(DATA[4 * (end - p.length) : 4 * end]) == p.name]
            assert [self._place(self.tables[which], donor) for donor in donors] == equal
            assert num_named == len({place.length for place in places})

    def _add(self, which: int, ending: int, place: Place) -> None:
        if place.length < ENDING_LEN:
            return
        self.tables[which].add(ending, *place)
        places = self.models[which].setdefault(ending, [])
        same = [known for known in places if known.name == place.name]
        if any(known.start == place.start and known.node is place.node for known in same):
            return
        if len(same) == 3:
            places.remove(same[-1])
        elif len(places) == MAX_PER_ENDING:
            places.pop()
        places.insert(0, place)

    def _grow(self, which: int) -> None:
        """One more node, below the last one or as the first."""
        trie, nodes = self.tries[which], self.nodes[which]
        parent = nodes[-1] if nodes else trie.root
        if not parent.children or parent is trie.root:
            tokens = as_tokens(np.arange(SEGMENT_LEN) + SEGMENT_LEN * len(parent.children))
            nodes.append(trie.append(parent, tokens))

    @staticmethod
    def _place(table: DonorTable, donor: int) -> Place:
        node = table.nodes[donor]
        assert node is not None
        return Place(table.names[donor], node, table.starts[donor], table.lengths[donor])


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTable = TableMachine.TestCase


@given(tokens_of(0, 80), st.data())
def test_a_scan_finds_every_known_ending_in_its_range(tokens: Tokens, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    trie = Trie("a", OrderedDict(), iter(range(9)))
    node = trie.append(trie.root, as_tokens(range(80)))
    table = DonorTable(4, weak_name, TableSize())
    known = {
        naive_ending(tokens[at - ENDING_LEN : at].tolist())
        for at in data.draw(st.sets(st.integers(ENDING_LEN, max(ENDING_LEN, len(tokens)))))
        if at <= len(tokens)
    }
    for ending in sorted(known):
        table.add(ending, 1, node, 0, 80)
    places, endings = map(list, table.scan(tokens, start, end))
    everywhere = range(max(start + 1, ENDING_LEN), end + 1)
    hashes = {place: naive_ending(tokens[place - ENDING_LEN : place].tolist()) for place in everywhere}
    assert endings == [hashes[place] for place in places]
    assert places == sorted(set(places))
    assert {place for place, ending in hashes.items() if ending in known} <= set(places)
