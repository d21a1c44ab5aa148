"""The census's simulation and its trees, against dictionaries of rows, of paths and of nodes."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pic.census.outcome import RunSpan
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.simulate import simulate
from sglang_pic.core import Tokens, as_tokens, common_len
from tests.helpers.census_fakes import CONFIG, Ids, IdsEncoder, session
from tests.helpers.core_builders import Rows

BOUND = msgspec.structs.replace(CONFIG, max_index_tokens=1, max_index_bytes=1 << 16)

_RNG = np.random.default_rng(7)
# Texts that repeat; the last two differ in their middle only.
TEXTS = [_RNG.integers(2, 1000, size).tolist() for size in (1, 3, 30, 60, 90)]
TEXTS.append([*TEXTS[-1][:40], 1, *TEXTS[-1][41:]])

NUMBERS = st.integers(0, len(TEXTS) - 1)
MESSAGES = st.lists(st.lists(NUMBERS, max_size=2), min_size=1, max_size=4)
CALLS = st.lists(st.tuples(MESSAGES, NUMBERS), min_size=1, max_size=8)


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


@settings(max_examples=40)
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


def test_the_servers_bounds_are_lifted() -> None:
    """With room for one token in the index the first text would be gone when it is needed."""
    sessions = [session(f"{n}", [([TEXTS[n], TEXTS[4]], [5])]) for n in (2, 3)]
    assert [len(outcome.runs) for outcome in simulate([("f", sessions)], IdsEncoder(), config=BOUND)] == [0, 1]


def test_no_call_is_kept() -> None:
    """Memory is to grow with distinct tokens only: nothing holds on to a prompt."""
    calls = [([TEXTS[3]] * (n + 1), [5]) for n in range(5)]
    outcomes = simulate([("f", [session("s", calls)])], IdsEncoder(), config=CONFIG)
    alive = [weakref.ref(outcome.encoded) for outcome in outcomes]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


# Few different tokens and short paths: they share prefixes of every length, split segments, repeat and extend.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=25)


def shared_len(left: Ids, right: Ids) -> int:
    return common_len(as_tokens(left), as_tokens(right))


class Model:
    """All paths, and a loop over them."""

    def __init__(self) -> None:
        self.paths: list[Ids] = []

    def match(self, prompt: Ids) -> tuple[int, int | None, Ids]:
        shared = [shared_len(prompt, path) for path in self.paths]
        best = max(shared, default=0)
        if best == 0:
            return 0, None, []
        neighbor = max(call for call, length in enumerate(shared) if length == best)
        prefix_len = min(best, len(prompt) - 1)
        return prefix_len, neighbor, self.paths[neighbor][prefix_len:]

    def stored(self, path: Ids) -> int:
        return max((shared_len(path, other) for other in self.paths), default=0)

    def appender(self, path: Ids, position: int) -> int:
        return next(call for call, other in enumerate(self.paths) if shared_len(path, other) > position)


@given(PATHS)
def test_it_agrees_with_a_loop_over_all_paths(paths: list[Ids]) -> None:
    tree, model = PrefixTree(), Model()
    for call, path in enumerate(paths):
        # Prompt and answer part at the middle: answers are stored, prompts are looked up.
        prompt = path[: (len(path) + 1) // 2]
        prefix_len, neighbor, expected = tree.match(as_tokens(prompt))
        assert (prefix_len, neighbor, expected.tolist()) == model.match(prompt)
        assert tree.insert(as_tokens(path), call) == model.stored(path)
        model.paths.append(path)
    for path in paths:
        for position in range(len(path)):
            assert tree.appender(as_tokens(path), position) == model.appender(path, position)
