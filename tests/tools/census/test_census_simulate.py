"""The census's simulation and its trees, against dictionaries of rows, of paths and of nodes."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pic.census.outcome import RunSpan
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.simulate import simulate
from sglang_pic.census.state_config import state_rules
from sglang_pic.census.states import StateRules, StateTree, Strategy
from sglang_pic.core import Tokens, as_tokens, common_len
from sglang_pic.errors import ConfigError
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


def path(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


class _Listed:
    """The rules again, over every path and every state."""

    def __init__(self, rules: StateRules) -> None:
        self._rules, self._paths, self.states = rules, list[Tokens](), set[bytes]()

    def serve(self, whole: Tokens, prompt_len: int) -> tuple[int, int]:
        rules, prompt = self._rules, whole[: prompt_len - 1]
        rows = max((common_len(stored, prompt) for stored in self._paths), default=0)
        start = hit = max((at for at in range(len(prompt) + 1) if prompt[:at].tobytes() in self.states), default=0)
        buffered = rules.strategy is Strategy.EXTRA_BUFFER
        grid = rules.mamba_chunk_size if buffered else 1
        branch = rows // grid * grid
        while start < prompt_len:
            end = min(start + rules.chunked_prefill_size, prompt_len)
            on_grid = range(start + grid, end + 1, grid)
            if on_grid:
                self._keep(whole[: branch if buffered and branch in on_grid else on_grid[-1]])
            start = end
        step = rules.mamba_track_interval if buffered else 1
        crossed = [at for at in range(prompt_len + 1, len(whole)) if at % step == 0]
        if crossed:
            self._keep(whole[: crossed[-1]])
        return hit, rows

    def _keep(self, stored: Tokens) -> None:
        self._paths.append(stored)
        self.states.add(stored.tobytes())


@given(
    st.sampled_from(
        [
            StateRules(chunked_prefill_size=24, mamba_chunk_size=4, mamba_track_interval=8),
            StateRules(chunked_prefill_size=32, mamba_chunk_size=8, mamba_track_interval=16),
            StateRules(chunked_prefill_size=10, strategy=Strategy.NO_BUFFER),
        ]
    ),
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 20)), min_size=1, max_size=9
    ),
)
def test_a_tree_serves_what_a_list_serves(rules: StateRules, calls: list[tuple[list[int], int]]) -> None:
    texts = [np.arange(100 * (text + 1), 100 * (text + 1) + 13, dtype=np.int32) for text in range(3)]
    tree, listed = StateTree(rules), _Listed(rules)
    for numbers, answer_len in calls:
        prompt = path(*(texts[number] for number in numbers))
        whole = path(prompt, np.full(answer_len, 7, dtype=np.int32))
        assert tuple(tree.serve(whole, len(prompt))) == listed.serve(whole, len(prompt))
        assert len(tree._kept) == len(listed.states)


def test_a_fork_that_is_known_by_its_text_has_a_state_before_the_first_prompt_parts_there() -> None:
    """Two tasks behind one head, and two at a later hour."""
    head = list(range(100, 170))
    tasks = [list(range(at, at + 40)) for at in (200, 300, 400, 500)]
    calls = [([[hour], head, task], [7]) for hour, task in zip((20, 20, 21, 21), tasks, strict=True)]
    rules = StateRules(mamba_chunk_size=4)
    trees = StateTree(rules), StateTree(rules, chooses=True)
    outcomes = simulate(
        [("f", [session(str(number), [call]) for number, call in enumerate(calls)])], IdsEncoder(), config=CONFIG
    )
    hits = [
        (each.prefix_len, *(tree.serve(each.encoded.path, len(each.encoded.tokens)).state_len for tree in trees))
        for each in outcomes
    ]
    assert hits == [(0, 0, 0), (71, 0, 0), (0, 0, 0), (71, 0, 68)]


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        (None, StateRules()),
        ({"model_type": "llama"}, StateRules()),
        ({"model_type": "nemotron_h", "chunk_size": 128}, StateRules(mamba_chunk_size=128)),
        ({"architectures": ["ZayaForCausalLM"]}, StateRules(strategy=Strategy.NO_BUFFER)),
    ],
)
def test_states_are_kept_as_the_models_configuration_says(
    config: dict[str, object] | None, rules: StateRules, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert state_rules(tmp_path) == rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"config\.json: not a model's configuration"),
        ('{"mamba_chunk_size": "many"}', r"config\.json: mamba_chunk_size='many': must be a number, 1 or more"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        state_rules(tmp_path)
