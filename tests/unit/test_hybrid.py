"""States of hybrid models in the census: SGLang's rules on paths that are known, and against a plain list of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from census_fakes import CONFIG, IdsEncoder, session
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census.hybrid import Hybrid, HybridTally, Loss
from sglang_pic.census.inputs import add_input_arguments, add_state_arguments, state_rules_of
from sglang_pic.census.simulate import simulate
from sglang_pic.census.states import StateHit, StateRules, StateTree, Strategy
from sglang_pic.core import Tokens, common_len
from sglang_pic.errors import ConfigError

NO_BUFFER = StateRules(strategy=Strategy.NO_BUFFER, chunked_prefill_size=700)
BUFFER = StateRules(chunked_prefill_size=512)
_HEAD, _FIRST, _SECOND, _THIRD = (np.arange(at, at + 1000, dtype=np.int32) for at in (0, 2000, 4000, 6000))


def path(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def served(tree: StateTree, prompt: Tokens, answer_len: int = 1) -> StateHit:
    return tree.serve(path(prompt, np.full(answer_len, 9999, dtype=np.int32)), len(prompt))


def test_states_lie_on_the_grid_of_a_chunk_and_of_an_answer() -> None:
    tree = StateTree(BUFFER)
    assert served(tree, _HEAD, 100) == (0, 0)
    assert tree.depths == [512, 960, 1024]
    assert served(tree, path(_HEAD, np.full(100, 9999, dtype=np.int32), _FIRST)).state_len == 1024
    assert served(tree, path(_HEAD, _FIRST)) == (960, 1000), "the rows of 24 tokens more were there"


def test_a_state_is_kept_where_the_second_prompt_parts_in_place_of_its_last_one() -> None:
    """The third has it; the second prompt, continued, has no other."""
    tree = StateTree(StateRules())
    served(tree, path(_HEAD[:500], _FIRST))
    second = path(_HEAD[:500], _SECOND)
    assert served(tree, second) == (0, 500)
    assert tree.depths == [1472, 448]
    assert served(tree, path(_HEAD[:500], _THIRD)) == (448, 500)
    assert served(tree, path(second, _THIRD)).state_len == 448


def test_without_a_buffer_states_are_where_passes_end_and_at_no_fork() -> None:
    tree = StateTree(NO_BUFFER)
    served(tree, _HEAD, 10)
    assert tree.depths == [700, 1000, 1009]
    assert [served(tree, path(_HEAD[:900], rest)) for rest in (_FIRST, _SECOND, _THIRD)] == [(700, 900)] * 3


def test_the_least_recently_used_state_goes_and_a_leaf_goes_with_its_rows() -> None:
    tree = StateTree(StateRules(max_states=2))
    served(tree, _FIRST)
    served(tree, _SECOND)
    assert served(tree, path(_FIRST, _HEAD)).state_len == 960
    assert served(tree, path(_SECOND, _HEAD)) == (0, 0)
    assert (len(tree.depths), tree.num_kept) == (2, 4)


CALLS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 20)), min_size=1, max_size=9
)
"""The texts of each prompt, and the length of its answer."""


class _Listed:
    """The rules again, over every path and every state, none of which is evicted."""

    def __init__(self, rules: StateRules) -> None:
        self._rules, self._paths, self.states = rules, list[Tokens](), set[bytes]()

    def serve(self, whole: Tokens, prompt_len: int) -> tuple[int, int]:
        rules, prompt = self._rules, whole[: prompt_len - 1]
        rows = max((common_len(stored, prompt) for stored in self._paths), default=0)
        start = hit = max((at for at in range(len(prompt) + 1) if prompt[:at].tobytes() in self.states), default=0)
        buffered = rules.strategy is Strategy.EXTRA_BUFFER
        grid = max(rules.mamba_chunk_size, rules.page_size) if buffered else 1
        rows -= rows % rules.page_size
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
            StateRules(chunked_prefill_size=32, mamba_chunk_size=4, page_size=8, mamba_track_interval=16),
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
        assert len(tree.depths) == tree.num_kept == len(listed.states)


def test_a_fork_that_is_known_by_its_text_has_a_state_before_the_first_prompt_parts_there() -> None:
    """Two tasks behind one head, and two at a later hour."""
    head = list(range(100, 170))
    tasks = [list(range(at, at + 40)) for at in (200, 300, 400, 500)]
    calls = [([[hour], head, task], [7]) for hour, task in zip((20, 20, 21, 21), tasks, strict=True)]
    hybrid = Hybrid(StateRules(mamba_chunk_size=4))
    outcomes = simulate(
        [("f", [session(str(number), [call]) for number, call in enumerate(calls)])], IdsEncoder(), config=CONFIG
    )
    *_, last = hits = [hybrid.observe(outcome) for outcome in outcomes]
    assert [(hit.rows_len, hit.state_len) for hit in hits] == [(0, 0), (71, 0)] * 2
    assert (last.placed_len, last.num_lost, last.loss) == (68, 71, Loss.FORK)
    tally = HybridTally()
    for hit in hits:
        tally.add(hit)
    counts = tally.counts()
    assert (counts.state_tokens, counts.placed_tokens, counts.lost_tokens) == (0, 68, 142)
    assert counts.lost_by_cause == {"fork": 142}
    assert (counts.num_states, counts.num_placed_states) == (4, 4)


def test_a_state_is_kept_where_the_next_turn_will_leave_the_prompt() -> None:
    """Each turn is put in front of the same last words."""
    turns, last_words = [list(range(at, at + 30)) for at in (100, 200, 300, 400)], [20, 21, 22, 23, 24, 25, 26]
    calls = [([*turns[: number + 1], last_words], [7]) for number in range(4)]
    hybrid = Hybrid(StateRules(mamba_chunk_size=4))
    outcomes = simulate([("f", [session("a", calls)])], IdsEncoder(), config=CONFIG)
    hits = [hybrid.observe(outcome) for outcome in outcomes]
    assert [hit.rows_len for hit in hits] == [0, 30, 60, 90]
    assert [hit.state_len for hit in hits] == [0, 0, 28, 28], "states lie in the last words, or at the turn before"
    assert [hit.placed_len for hit in hits] == [0, 0, 60, 88]


@pytest.mark.parametrize(
    ("rules", "calls", "loss"),
    [
        (StateRules(), [(_FIRST, 20), (path(_FIRST, np.full(20, 7), _THIRD[:50]), 1)], Loss.GRID),
        (StateRules(), [(_FIRST[:800], 150), (path(_FIRST[:800], np.full(150, 7), _THIRD), 1)], Loss.ANSWER),
        (StateRules(max_states=1), [(_FIRST, 1), (_SECOND, 1), (path(_FIRST, _THIRD), 1)], Loss.EVICTED),
        (StateRules(), [(_FIRST, 1), (_FIRST, 1)], Loss.GRID),
        (NO_BUFFER, [(_FIRST, 1), (path(_FIRST[:900], _THIRD), 1)], Loss.FORK),
    ],
)
def test_why_a_state_is_missing(rules: StateRules, calls: list[tuple[Tokens, int]], loss: Loss) -> None:
    sessions = [session(f"{at}", [([each.tolist()], [7] * answer)]) for at, (each, answer) in enumerate(calls)]
    hybrid = Hybrid(rules)
    *_, hit = (hybrid.observe(outcome) for outcome in simulate([("f", sessions)], IdsEncoder(), config=CONFIG))
    assert hit.loss is loss
    assert hit.num_lost == hit.rows_len - hit.state_len > 0
    assert ("--mamba-radix-cache-strategy extra_buffer" in loss.advice(rules)) == (rules is NO_BUFFER)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"page_size": 48}, "--page-size=48: one of it and --mamba-chunk-size=64 must divide"),
        ({"page_size": 2, "strategy": Strategy.NO_BUFFER}, "--page-size=2: must be 1 with no_buffer"),
        ({"max_states": 0}, "--max-states=0: must be 1 or more"),
    ],
)
def test_what_sglang_refuses_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StateRules(**fields)  # type: ignore[arg-type]


def asked(*words: str) -> StateRules | None:
    """The rules of a command line."""
    parser = argparse.ArgumentParser()
    add_input_arguments(parser)
    add_state_arguments(parser)
    return state_rules_of(parser.parse_args(["log.jsonl", *words]))


@pytest.mark.parametrize(
    ("config", "flags", "rules"),
    [
        (None, [], StateRules()),
        ({"model_type": "llama"}, [], StateRules()),
        ({"model_type": "nemotron_h", "chunk_size": 128}, [], StateRules(mamba_chunk_size=128)),
        ({"model_type": "nemotron_h"}, ["--mamba-chunk-size", "64"], StateRules()),
        ({"architectures": ["ZayaForCausalLM"]}, [], StateRules(strategy=Strategy.NO_BUFFER)),
        ({"architectures": ["ZayaForCausalLM"]}, ["--mamba-radix-cache-strategy", "extra_buffer"], StateRules()),
    ],
)
def test_what_the_user_leaves_out_is_the_models(
    config: dict[str, object] | None, flags: list[str], rules: StateRules, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert asked("--hybrid", "--tokenizer", str(tmp_path), *flags) == rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"config\.json: not a model's configuration"),
        ('{"mamba_chunk_size": "many"}', r"config\.json: mamba_chunk_size='many': must be a number, 1 or more"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert asked("--tokenizer", str(tmp_path)) is None
    with pytest.raises(ConfigError, match=said):
        asked("--hybrid", "--tokenizer", str(tmp_path))
