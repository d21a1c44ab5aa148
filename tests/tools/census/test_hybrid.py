"""States of hybrid models in the census: SGLang's rules on paths that are known, and against a plain list of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census.hybrid import Hybrid
from sglang_pic.census.inputs import state_rules_of
from sglang_pic.census.simulate import simulate
from sglang_pic.census.states import StateRules, StateTree, Strategy
from sglang_pic.core import Tokens, common_len
from sglang_pic.errors import ConfigError
from tests.helpers.census_fakes import CONFIG, IdsEncoder, session


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
        assert len(tree.depths) == len(listed.states)


def test_a_fork_that_is_known_by_its_text_has_a_state_before_the_first_prompt_parts_there() -> None:
    """Two tasks behind one head, and two at a later hour."""
    head = list(range(100, 170))
    tasks = [list(range(at, at + 40)) for at in (200, 300, 400, 500)]
    calls = [([[hour], head, task], [7]) for hour, task in zip((20, 20, 21, 21), tasks, strict=True)]
    hybrid = Hybrid(StateRules(mamba_chunk_size=4))
    outcomes = simulate(
        [("f", [session(str(number), [call]) for number, call in enumerate(calls)])], IdsEncoder(), config=CONFIG
    )
    hits = [(outcome.prefix_len, hybrid.observe(outcome)) for outcome in outcomes]
    assert [rows_len for rows_len, _ in hits] == [0, 71] * 2
    assert [(hit.state_tokens, hit.placed_tokens) for _, hit in hits] == [(0, 0)] * 3 + [(0, 68)]


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
    assert state_rules_of(str(tmp_path)) == rules
    assert state_rules_of(None) == StateRules()


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
        state_rules_of(str(tmp_path))
