"""Cuts tile and are equal in equal text; endings and their filter against plain models."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from fastcdc import fastcdc
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pic.core import CoreConfig, Tokens, as_tokens, token_loops
from sglang_pic.core.chunker import Chunker, xxh3_name
from sglang_pic.core.donors import DonorTable, TableSize
from sglang_pic.core.ending_filter import EndingFilter
from sglang_pic.core.token_loops import ENDING_LEN
from sglang_pic.core.trie import Trie
from tests.helpers.core_builders import join, text

OPEN, CLOSE = as_tokens([1]), as_tokens([2])
DELIMITERS = frozenset({1, 2})

CONFIGS = [
    CoreConfig(chunk_min_tokens=4, chunk_avg_tokens=16, chunk_max_tokens=64),
    CoreConfig(),
    CoreConfig(chunk_min_tokens=16, chunk_avg_tokens=64, chunk_max_tokens=256),
]

token_lists = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 5), max_size=300).map(as_tokens)


@given(token_lists, st.sampled_from(CONFIGS), st.data())
def test_chunks_tile_within_their_sizes(tokens: Tokens, config: CoreConfig, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    spans = list(pairwise([start, *Chunker(config).cut(tokens, start, end, delimiters=DELIMITERS)]))
    assert [position for a, b in spans for position in range(a, b)] == list(range(start, end))
    for a, b in spans:
        assert a < b <= a + config.chunk_max_tokens + 1
        has_delimiter = bool(np.isin(tokens[a:b], list(DELIMITERS)).any())
        assert not has_delimiter or b - a == 1, "a delimiter is a chunk of its own"
        ends_early = b == end or tokens[b] in DELIMITERS or has_delimiter
        assert ends_early or b - a >= config.chunk_min_tokens


def test_cuts_are_the_librarys_rounded_up_to_tokens() -> None:
    tokens = text(1, 5_000)
    offsets = [chunk.offset + chunk.length for chunk in fastcdc(tokens.tobytes(), 64, 256, 1024)]
    assert Chunker(CONFIGS[2]).cut(tokens) == [-(-offset // 4) for offset in offsets]


@given(st.sampled_from(CONFIGS), st.integers(0, 2**20), st.integers(0, 1_500), st.integers(0, 300), st.integers(0, 300))
@settings(deadline=None, derandomize=True)
def test_an_edit_moves_only_nearby_cuts(config: CoreConfig, seed: int, at: int, num_out: int, num_in: int) -> None:
    """Any insertion, deletion or replacement; in random text no edit was seen to reach further than ten averages."""
    chunker = Chunker(config)
    tokens = text(seed, 1_800 + 24 * config.chunk_avg_tokens + 300)
    edited = join(tokens[:at], text(seed + 1, num_in), tokens[at + num_out :])
    before, after = chunker.cut(tokens), chunker.cut(edited)
    assert [cut for cut in before if cut <= at] == [cut for cut in after if cut <= at]
    reach = at + num_in + 24 * config.chunk_avg_tokens
    behind = {cut + num_in - num_out for cut in before}
    assert {cut for cut in behind if cut > reach} == {cut for cut in after if cut > reach}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_out", [0, 1, 50])
def test_an_edit_inside_a_message_moves_no_cut_of_another(seed: int, num_out: int) -> None:
    """Delimiters put the cutter in step at once, whatever the text: here one that FastCDC finds no place to cut in."""
    chunker = Chunker(CoreConfig())
    messages = [join(OPEN, np.full(300, 7 + i), CLOSE) for i in range(5)]
    at = int(np.random.default_rng(seed).integers(2, 240))
    messages[1][at] = 9_999
    edited = [*messages]
    edited[1] = join(messages[1][:at], text(seed, 30), messages[1][at + num_out :])
    moved = 30 - num_out
    before, after = (chunker.cut(as_tokens(np.concatenate(m)), delimiters=DELIMITERS) for m in (messages, edited))
    assert [cut for cut in before if cut <= 302] == [cut for cut in after if cut <= 302]
    assert [cut + moved for cut in before if cut >= 604] == [cut for cut in after if cut >= 604 + moved]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("delimiters", [DELIMITERS, frozenset()], ids=["delimiters", "none"])
def test_cutting_from_a_sync_start_gives_the_cuts_of_the_whole(seed: int, delimiters: frozenset[int]) -> None:
    chunker = Chunker(CoreConfig())
    tokens = text(seed, 6_000)
    tokens[np.random.default_rng(seed).integers(0, 6_000, 12)] = 1
    whole = set(chunker.cut(tokens, delimiters=delimiters))
    position = 3_000
    start = chunker.sync_start(tokens, position, delimiters)
    assert 0 <= position - start <= 1_000
    part = set(chunker.cut(tokens, start, delimiters=delimiters))
    assert {cut for cut in whole if cut > position} == {cut for cut in part if cut > position}


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
    hashes = token_loops.hash_endings(tokens)
    assert hashes.dtype == np.uint32
    assert hashes.tolist() == [naive_ending(window) for window in windows]
    assert tokens.tolist() == ids, "the input is left as it is"


@pytest.mark.parametrize("num_endings", [1, 63, 64, 65, 1_000, 50_000])
def test_the_rate_of_false_positives_is_bounded(num_endings: int) -> None:
    """At random endings, and at those of text that the filter has not seen."""
    rng = np.random.default_rng(num_endings)
    endings = rng.integers(0, MASK, num_endings, dtype=np.uint32)
    found = EndingFilter()
    found.rebuild(endings)
    unseen = token_loops.hash_endings(text(num_endings, 100_000))
    for hashes in (unseen, rng.integers(0, MASK, 100_000, dtype=np.uint32)):
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
