"""The simulation, against a cache that is a dictionary with one entry a token."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest
from census_fakes import CONFIG, Ids, IdsEncoder, session
from core_builders import Rows
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census.outcome import RunSpan
from sglang_pic.census.simulate import CacheScope, simulate
from sglang_pic.core import Tokens, common_len

BOUND = msgspec.structs.replace(CONFIG, max_index_tokens=1, max_index_bytes=1 << 16)

_RNG = np.random.default_rng(7)
# Texts that repeat; the last two differ in their middle only.
TEXTS = [_RNG.integers(2, 1000, size).tolist() for size in (1, 3, 30, 60, 90)]
TEXTS.append([*TEXTS[-1][:40], 1, *TEXTS[-1][41:]])

CALLS = st.lists(
    st.tuples(
        st.lists(st.lists(st.integers(0, len(TEXTS) - 1), max_size=2), min_size=1, max_size=4),
        st.integers(0, len(TEXTS) - 1),
    ),
    min_size=1,
    max_size=8,
)


def texts(numbers: list[int]) -> Ids:
    return [token for number in numbers for token in TEXTS[number]]


def is_donated(rows: Rows, paths: list[Tokens], prompt: Tokens, run: RunSpan) -> bool:
    """Whether rows stand on some path that were computed for a run's very tokens, the first brought by its donor."""
    start, end = run.start - run.shift, run.end - run.shift
    return any(
        np.array_equal(path[start:end], prompt[run.start : run.end])
        and run.donor.number == next(call for call, other in enumerate(paths) if common_len(other, path) > start)
        and all(rows.computed[rows.name("", path, at)] for at in range(start, end))
        for path in paths
    )


@given(CALLS)
def test_every_call_is_served_as_by_a_cache_of_rows(drawn: list[tuple[list[list[int]], int]]) -> None:
    calls = [([texts(message) for message in messages], TEXTS[answer]) for messages, answer in drawn]
    rows, paths = Rows(), list[Tokens]()
    half = len(calls) // 2
    sessions = [session("a", calls[:half]), session("b", calls[half:])]
    for outcome in simulate([("f", sessions)], IdsEncoder(), config=CONFIG):
        prompt, path = outcome.encoded.tokens, outcome.encoded.path
        assert outcome.prefix_len == max(0, min(rows.resident("", prompt), len(prompt) - 1))
        at = max(outcome.prefix_len, CONFIG.sink_tokens)
        for run in outcome.runs:
            assert at <= run.start < run.end < len(prompt)
            assert run.start - run.shift >= CONFIG.sink_tokens
            assert run.seam_len <= min(CONFIG.seam_tokens, run.start - at), "a seam lies in the gap before its run"
            assert is_donated(rows, paths, prompt, run)
            at = run.end
        stored = rows.resident("", path)
        rows.insert("", path, [], [(max(run.start, stored), run.end) for run in outcome.runs])
        paths.append(path)
    assert len(paths) == len(calls)


def test_neighbor_and_what_was_expected() -> None:
    calls = [([TEXTS[2], TEXTS[3]], [5, 6]), ([TEXTS[2], [1, 2, 3]], [7]), ([TEXTS[2], [1, 2, 3], [7], [8]], [9])]
    first, second, third = simulate([("f", [session("s", calls)])], IdsEncoder(), config=CONFIG)
    assert first.expected.tolist() == []
    assert (second.neighbor, second.prefix_len) == (first.ref, 30)
    assert second.expected.tolist() == [*TEXTS[3], 5, 6]
    # The third continues the second with its answer: nothing broke.
    assert (third.neighbor, third.prefix_len, third.expected.tolist()) == (second.ref, 34, [])


@pytest.mark.parametrize(("scope", "prefix_lens"), [(CacheScope.FILE, [0, 0]), (CacheScope.ALL, [0, 90])])
def test_scope_of_the_cache(scope: CacheScope, prefix_lens: list[int]) -> None:
    files = [(name, [session("s", [([TEXTS[4], [5]], [6])])]) for name in ("f", "g")]
    outcomes = list(simulate(files, IdsEncoder(), config=CONFIG, scope=scope))
    assert [outcome.prefix_len for outcome in outcomes] == prefix_lens
    assert [outcome.ref for outcome in outcomes] == [(0, "f", "s", 0), (1, "g", "s", 0)]


def test_the_servers_bounds_are_lifted() -> None:
    """With room for one token in the index the first text would be gone when it is needed."""
    sessions = [session(f"{n}", [([TEXTS[n], TEXTS[4]], [5])]) for n in (2, 3)]
    outcomes = list(simulate([("f", sessions)], IdsEncoder(), config=BOUND))
    assert [len(outcome.runs) for outcome in outcomes] == [0, 1]


def test_no_call_is_kept() -> None:
    """Memory is to grow with distinct tokens only: nothing holds on to a prompt."""
    calls = [([TEXTS[3]] * (n + 1), [5]) for n in range(5)]
    alive = [
        weakref.ref(outcome.encoded)
        for outcome in simulate([("f", [session("s", calls)])], IdsEncoder(), config=CONFIG)
    ]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_odd_prompts() -> None:
    """No tokens at all, one token, and a prompt that was seen whole."""
    calls: list[tuple[list[Ids], Ids]] = [([[]], []), ([[4]], []), ([[4]], [5]), ([[4, 5]], []), ([[4, 5]], [])]
    outcomes = list(simulate([("f", [session("s", calls)])], IdsEncoder(), config=CONFIG))
    assert [outcome.prefix_len for outcome in outcomes] == [0, 0, 0, 1, 1]
    assert [outcome.neighbor and outcome.neighbor.index for outcome in outcomes] == [None, None, 1, 2, 3]
