"""Cuts: they tile, they obey the sizes, and equal text is cut equally wherever it stands."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from core_builders import join, text
from fastcdc import fastcdc
from fastcdc.fastcdc_py import fastcdc_py
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pic.core import CoreConfig, Tokens, as_tokens
from sglang_pic.core.chunker import Chunker, xxh3_name

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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.chunk_avg_tokens))
def test_chunks_have_about_the_average_size(config: CoreConfig) -> None:
    ends = Chunker(config).cut(text(0, 50_000))
    assert 0.5 * config.chunk_avg_tokens < 50_000 / len(ends) < 2 * config.chunk_avg_tokens


def test_cuts_are_the_librarys_rounded_up_to_tokens() -> None:
    tokens = text(1, 5_000)
    offsets = [chunk.offset + chunk.length for chunk in fastcdc(tokens.tobytes(), 64, 256, 1024)]
    assert Chunker(CONFIGS[2]).cut(tokens) == [-(-offset // 4) for offset in offsets]


def test_the_compiled_and_the_plain_library_agree() -> None:
    """Ranks of one server may have different builds of it; they must still make the same plans."""
    data = text(2, 20_000).tobytes()
    compiled, plain = (
        [(chunk.offset, chunk.length) for chunk in cut(data, 64, 256, 1024)] for cut in (fastcdc, fastcdc_py)
    )
    assert compiled == plain


@given(
    st.sampled_from(CONFIGS),
    st.integers(0, 2**20),
    st.integers(0, 1_500),
    st.integers(0, 300),
    st.integers(0, 300),
)
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


def test_names_are_xxh3_of_the_little_endian_bytes() -> None:
    tokens = text(3, 100)
    chunker = Chunker(CoreConfig())
    assert chunker.name(tokens.data.cast("B"), 10, 20) == xxh3_name(memoryview(tokens[10:20].astype("<i4").tobytes()))
