"""The loops compute compiled what they compute uncompiled, plans included, and are compiled once, at start."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pic.core import Lexicon, Tokens, as_tokens, load_loops, native, token_loops, word_loops
from sglang_pic.core.tokens import common_len, common_suffix_len
from sglang_pic.core.trie import ANY, ELIGIBLE, Trie, equal_end, equal_start

IS_COMPILED = load_loops()
compiled = pytest.mark.skipif(not IS_COMPILED, reason="no numba, or SGLANG_PIC_LOOPS=python")

Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture
# Words, numbers, signs and spaces in several scripts; letters whose folding is longer than they are.
PIECES = [*"aBßİﬁ²٣7:.,_- \n界", " a", "ab", " Ab", "18", "'s", ""]
LEXICON = Lexicon(PIECES)
TEXTS = st.lists(st.integers(0, len(PIECES) + 1), max_size=50).map(as_tokens)
WORDS = st.lists(st.text("abß7182:.İ界", min_size=1, max_size=5).map(str.casefold), max_size=8, unique=True)


def assert_alike(function: Any, *args: Any) -> None:
    """The loop gives the same compiled and uncompiled."""
    one, other = (
        [*result] if isinstance(result, tuple) else [result]
        for result in (function(*args), native.PLAIN[function.__name__](*args))
    )
    assert [*map(np.ndarray.tolist, map(np.asarray, one))] == [*map(np.ndarray.tolist, map(np.asarray, other))]


@compiled
@given(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 9))
def test_endings(seed: int, num_tokens: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(-(1 << 31), 1 << 31, num_tokens + more).astype(np.int32)[more:]
    slots = rng.integers(0, 256, 1 << 12, dtype=np.uint8)
    assert_alike(token_loops.hash_endings, tokens)
    assert_alike(token_loops.find_set, token_loops.hash_endings(tokens), slots, 20)


@st.composite
def much_alike(draw: st.DrawFn) -> tuple[Tokens, Tokens]:
    """Two texts of one length, equal but for a few tokens, so that whole blocks are compared."""
    left = as_tokens(np.random.default_rng(draw(st.integers(0, 9))).integers(0, 4, draw(st.integers(1, 150))))
    right = left.copy()
    for place in draw(st.lists(st.integers(0, len(left) - 1), max_size=3)):
        right[place] += 1
    return left, right


@given(st.lists(st.integers(0, 5), max_size=40), st.data())
def test_the_equal_parts_are_those_of_difflib(old: list[int], data: st.DataObject) -> None:
    # Pieces of the old text and others, in any order.
    pieces = st.one_of(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 40).map(lambda at: old[at : at + 9]))
    new = [*itertools.chain(*data.draw(st.lists(pieces, max_size=6)))]
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    args = as_tokens(old), as_tokens(new), 4
    num_pairs = sum(old.count(token) for token in new)
    found, parts = token_loops.equal_parts(*args, max(1, num_pairs))
    assert found == num_pairs
    assert sorted(map(tuple, parts.reshape(-1, 3).tolist())) == [tuple(each) for each in blocks if each.size >= 4]
    assert_alike(token_loops.equal_parts, *args, max(1, num_pairs))
    if num_pairs > 1:
        assert token_loops.equal_parts(*args, num_pairs - 1)[0] == num_pairs


@given(much_alike(), st.data())
def test_what_is_found_is_equal_eligible_and_all_of_it(texts: tuple[Tokens, Tokens], data: st.DataObject) -> None:
    (stored, prompt), at = texts, data.draw(st.integers(0, len(texts[0])))
    total, differs = len(stored), (stored != prompt).tolist()
    before = max((place for place in range(at) if differs[place]), default=-1)
    after = min((place for place in range(at, total) if differs[place]), default=total)
    assert common_len(stored[at:], prompt[at:]) == after - at
    assert common_suffix_len(stored[:at], prompt[:at]) == at - 1 - before
    around = token_loops.equal_around(stored, at, prompt, at, at, total - at)
    assert around == (at - 1 - before, after - at)

    trie = Trie("n", OrderedDict(), itertools.count())
    node = trie.append(trie.root, stored)
    first, last = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    node.eligible = [(first, last)] if first < last else []
    for rows, low, high in ((ANY, 0, total), (ELIGIBLE, first, last)):
        end, start = (equal_end(node, at, 0, prompt, total, rows)[1], equal_start(node, at, 0, prompt, 0, rows)[1])
        assert end == (min(after, high) if low <= at < high else at)
        assert start == (max(before + 1, low) if low < at <= high else at)

    if total >= 8:
        hashes = token_loops.hash_endings(prompt)
        assert [int(token_loops.hash_endings(prompt[i : i + 8])[0]) for i in range(total - 7)] == hashes.tolist()
        slots = np.array(data.draw(st.lists(st.integers(0, 255), min_size=64, max_size=64)), np.uint8)
        known = [i for i, each in enumerate(hashes.tolist()) if slots[each >> 26] >> (each & 7) & 1]
        assert token_loops.find_set(hashes, slots, 26).tolist() == known


@compiled
@settings(max_examples=60)
@given(TEXTS, WORDS, WORDS, st.integers(0, 12))
def test_words_are_found_alike(tokens: Tokens, words: list[str], rare: list[str], most_tries: int) -> None:
    if not words and not rare:
        return
    with pytest.MonkeyPatch.context() as patch:
        asked: list[Any] = []
        find = word_loops.find_words
        patch.setattr(word_loops, "find_words", lambda *args: (asked.append(args), find(*args))[1])
        LEXICON.find(words, tokens, rare=rare)
    [(_, heads, *arrays, _)] = asked
    for repeats in (1, 12):
        for most_here in (most_tries, 1 << 20):
            assert_alike(find, np.tile(tokens, repeats), heads, *arrays, most_here)
            assert not heads.any()


@compiled
def test_no_request_compiles() -> None:
    """Each loop is compiled for one list of types, when it is loaded, and refuses others."""
    declared = [name for name, parameters in native._parameters.items() if parameters]
    loops = [native.PLAIN[name].__globals__[name] for name in declared]
    assert len(loops) >= 9
    assert [len(loop.signatures) for loop in loops] == [1] * len(loops)
    with pytest.raises(TypeError, match="No matching definition"):
        token_loops.hash_endings(np.zeros(9, np.int64))


ONE_LOOP = """
import sys
sys.path.insert(0, sys.argv[1])
from sglang_pic.core import native
native.PLAIN.clear()
import one
assert native.load_loops()
assert one.total(one.np.arange(4, dtype="i4")) == 6
print(sum(one.total.stats.cache_hits.values()))
"""


def make_package(folder: Path) -> Path:
    """A package of one loop."""
    package = folder / "package"
    package.mkdir()
    source = [
        "import numpy as np",
        "from sglang_pic.core.native import loop",
        "@loop('t')",
        "def total(a): return a.sum()",
    ]
    (package / "one.py").write_text("\n".join(source))
    return package


@compiled
def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_LOOP, str(make_package(tmp_path))]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(rank.communicate(timeout=120)[0] for rank in ranks) == ["0\n", "1\n", "1\n"]


@compiled
def test_the_cache_needs_no_writable_package(tmp_path: Path) -> None:
    """Where a package's folder cannot be written to the user's cache folder has what was compiled."""
    package = make_package(tmp_path)
    # For the superuser no folder is read-only; this one cannot be made.
    (package / "__pycache__").write_text("")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    hits = [
        subprocess.run(
            [sys.executable, "-c", ONE_LOOP, str(package)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for _ in range(2)
    ]
    assert hits == ["0\n", "1\n"]
    assert list((tmp_path / "cache").rglob("*.nbi"))


PLANS = """
import sys
from pic_traces import load
from pic_traces.encode import load_encoder
from sglang_pic.census.simulate import simulate
for outcome in simulate([("file", load("clock:sample:agents"))], load_encoder(None)):
    print(outcome.prefix_len, outcome.runs, outcome.changed_fields, outcome.guarded)
"""


@compiled
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


@compiled
def test_without_numba_python_does_it(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        with caplog.at_level(logging.WARNING):
            assert not load_loops.__wrapped__()
        assert "numba" in caplog.text
        assert token_loops.equal_from is native.PLAIN["equal_from"]
    finally:
        monkeypatch.undo()
        assert load_loops.__wrapped__()
