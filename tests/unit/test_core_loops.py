"""The compiled loops compute what their Python twins do, plans included, and may be missing."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pic_native
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Lexicon, Tokens, as_tokens, native
from sglang_pic.core.alignment import find_flank
from sglang_pic.core.context import count_misfits
from sglang_pic.core.ending_filter import find_set, hash_endings
from sglang_pic.core.lexicon import find_words, nearest_break, words_in
from sglang_pic.core.tokens import common_len, common_suffix_len, equal_around
from sglang_pic.core.trie import ANY, ELIGIBLE, Trie, equal_end, equal_start

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C compiler")

Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture
TOKENS = st.lists(st.integers(0, 3), max_size=60).map(as_tokens)
# Words, numbers, signs and spaces in several scripts; letters whose folding is longer than they are.
PIECES = [*"aBßİﬁ²٣7:.,_- \n界", " a", "ab", " Ab", "18", "'s", ""]
LEXICON = Lexicon(PIECES)
TEXTS = st.lists(st.integers(0, len(PIECES) + 1), max_size=50).map(as_tokens)
WORDS = st.lists(st.text("abß7182:.İ界", min_size=1, max_size=5).map(str.casefold), max_size=8, unique=True)


def assert_alike(function: Any, *args: Any) -> None:
    """The compiled function, and the Python function of which it is the twin, give the same."""
    assert function(*args) == function.__wrapped__(*args)


@given(TOKENS, TOKENS, st.integers(0, 60), st.lists(st.integers(-70, 70), max_size=3).map(tuple))
def test_comparisons(left: Tokens, right: Tokens, middle: int, shifts: tuple[int, ...]) -> None:
    assert_alike(count_misfits, left, right, shifts)
    assert_alike(common_len, left, right)
    assert_alike(common_suffix_len, left, right)
    both = min(len(left), len(right))
    assert_alike(equal_around, left[:both], right[:both], min(middle, both))
    assert_alike(find_flank, left, right, [0, 1, 5, 20], 8)
    assert_alike(find_flank, left, right, [0, 2], 2)


@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 9))
def test_endings(seed: int, num_tokens: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-(1 << 31), 1 << 31, num_tokens + more).astype(np.int32)[more:]
    slots = rng.integers(0, 256, 1 << 12, dtype=np.uint8)
    assert_alike(hash_endings, tokens)
    assert_alike(find_set, np.frombuffer(hash_endings(tokens), np.uint32), slots, 20)


@st.composite
def much_alike(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Two texts of one length, equal but for a few tokens, so that whole blocks are compared."""
    left = as_tokens(np.random.default_rng(draw(st.integers(0, 9))).integers(0, 4, draw(st.integers(1, 150))))
    right = left.copy()
    for place in draw(st.lists(st.integers(0, len(left) - 1), max_size=3)):
        right[place] += 1
    return left, right


@pytest.mark.parametrize("twin", ["compiled", "python"])
@given(much_alike(), st.data())
def test_what_either_twin_finds_is_equal_eligible_and_all_of_it(
    twin: str, texts: tuple[Tokens, Tokens], data: st.DataObject
) -> None:
    """The same properties of the code that serves, and of the code that serves where there is no compiler."""

    def of(function: Any) -> Any:
        return function if twin == "compiled" else function.__wrapped__

    (stored, prompt), at = texts, data.draw(st.integers(0, len(texts[0])))
    total, differs = len(stored), (stored != prompt).tolist()
    before = max((place for place in range(at) if differs[place]), default=-1)
    after = min((place for place in range(at, total) if differs[place]), default=total)
    assert of(common_len)(stored[at:], prompt[at:]) == after - at
    assert of(common_suffix_len)(stored[:at], prompt[:at]) == at - 1 - before
    assert of(equal_around)(stored, prompt, at) == (before, after if after < total else -1)

    trie = Trie("n", OrderedDict(), itertools.count())
    node = trie.append(trie.root, stored)
    first, last = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    node.eligible = [(first, last)] if first < last else []
    for rows, low, high in ((ANY, 0, total), (ELIGIBLE, first, last)):
        end, start = (
            of(equal_end)(node, at, 0, prompt, total, rows)[1],
            of(equal_start)(node, at, 0, prompt, 0, rows)[1],
        )
        assert end == (min(after, high) if low <= at < high else at)
        assert start == (max(before + 1, low) if low < at <= high else at)

    if total >= 8:
        hashes = np.frombuffer(of(hash_endings)(prompt), np.uint32)
        assert [of(hash_endings)(prompt[i : i + 8]) for i in range(total - 7)] == [each.tobytes() for each in hashes]
        slots = np.array(data.draw(st.lists(st.integers(0, 255), min_size=64, max_size=64)), np.uint8)
        known = [i for i, each in enumerate(hashes.tolist()) if slots[each >> 26] >> (each & 7) & 1]
        assert np.frombuffer(of(find_set)(hashes, slots, 26), np.int64).tolist() == known


@given(st.lists(TOKENS.filter(len), min_size=1, max_size=6), st.data())
def test_walks_of_the_trie(paths: list[Tokens], data: st.DataObject) -> None:
    trie = Trie("n", OrderedDict(), itertools.count())
    for path in paths:
        node, stored = trie.walk(path)
        if stored < node.end:
            trie.split(node, stored)
        if stored < len(path):
            child = trie.append(node, path[stored:])
            cuts = sorted(data.draw(st.lists(st.integers(child.start, child.end), max_size=4, unique=True)))
            child.eligible = list(zip(cuts[::2], cuts[1::2], strict=False))
    prompt, path = data.draw(TOKENS), data.draw(st.sampled_from(paths))
    shift = data.draw(st.integers(-20, 20))
    rows = data.draw(st.sampled_from([ANY, ELIGIBLE]))
    node, stored = trie.walk(path)
    end = data.draw(st.integers(1, max(1, stored)))
    while node.start >= end:
        node = node.parent
    if 0 <= end + shift <= len(prompt):
        low = data.draw(st.integers(max(0, shift), max(0, shift, end + shift)))
        assert_alike_steps(trie, equal_start, node, end + shift, shift, prompt, low, rows)
        assert_alike_steps(trie, equal_end, node, end + shift, shift, prompt, len(prompt), rows)


def assert_alike_steps(trie: Trie, function: Any, *args: Any) -> None:
    """Alike, and the work that they count too."""
    results = []
    for each in (function, function.__wrapped__):
        trie.num_steps = 0
        results.append((each(*args), trie.num_steps))
    assert results[0] == results[1]


@given(TEXTS, WORDS, WORDS, st.integers(0, 12))
def test_words_are_found_alike(tokens: Tokens, words: list[str], rare: list[str], most_tries: int) -> None:
    asked = list(dict.fromkeys([*words, *rare]))
    ways = [LEXICON._ways_to_write(word) for word in asked]
    is_rare = bytes(word in rare for word in asked)
    for repeats in (1, 40):
        text = np.tile(tokens, repeats)
        for most in (most_tries, 1 << 20):
            assert_alike(find_words, asked, is_rare, ways, text, LEXICON._book, most, 24)


@given(TEXTS, st.integers(0, 50), st.integers(0, 50), st.integers(0, 4))
def test_words_of_a_span(tokens: Tokens, start: int, end: int, most: int) -> None:
    book = LEXICON._book
    start = min(start, len(tokens))
    assert_alike(words_in, tokens, start, end, book.texts, book.folded, most)
    for is_last in (False, True):
        assert_alike(nearest_break, tokens, start, end, LEXICON._breaks, is_last)


PLANS = """
import sys
from pic_traces import load
from pic_traces.encode import load_encoder
from sglang_pic.census.simulate import simulate
for outcome in simulate([("file", load("clock:sample:agents"))], load_encoder(None)):
    print(outcome.prefix_len, outcome.runs, outcome.changed_fields, outcome.guarded)
"""


def test_two_processes_make_the_same_plans_of_recorded_calls_with_the_loops_and_without() -> None:
    """Tensor-parallel ranks plan for themselves; Python's hash seed differs between them."""
    plans = []
    for seed, way in enumerate(("auto", "python"), start=1):
        environment = {**os.environ, "SGLANG_PIC_LOOPS": way, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", PLANS], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        plans.append(done.stdout)
    assert plans[0] == plans[1]
    assert plans[0].count("RunSpan") > 20


def test_an_unknown_switch_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setenv("SGLANG_PIC_LOOPS", "fast")
    with pytest.raises(ValueError, match="SGLANG_PIC_LOOPS='fast'"):
        native.load()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_python_does_it(compiler: str, tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(pic_native, "cache_from_source", lambda name: str(tmp_path / Path(name).name))
    native._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.load() is None
            assert native.load() is None
        assert len(caplog.records) == 1
        assert compiler in caplog.text
        counted = native.compiled(lambda left, right: len(left) + len(right))
        assert counted("ab", "c") == 3
    finally:
        native._load.cache_clear()
