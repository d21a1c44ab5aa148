"""Ending hashes and the filter over them, against plain models; `test_core_index` has the donors that they lead to."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Tokens, as_tokens
from sglang_pic.core.chunker import xxh3_name
from sglang_pic.core.donors import DonorTable, TableSize
from sglang_pic.core.ending_filter import ENDING_LEN, EndingFilter, ending_hashes
from sglang_pic.core.trie import Trie

MASK = 2**32 - 1

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


@given(tokens_of(0, 80), st.data())
def test_a_scan_finds_every_known_ending_in_its_range(tokens: Tokens, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    trie = Trie("a", OrderedDict(), iter(range(9)))
    node = trie.append(trie.root, as_tokens(range(80)))
    table = DonorTable(4, xxh3_name, TableSize())
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
