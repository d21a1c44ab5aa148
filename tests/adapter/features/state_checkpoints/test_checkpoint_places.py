"""Where the state of a prompt is kept: at places that earlier prompts were left at, wherever those stood."""

from __future__ import annotations

import numpy as np

from sglang_pic.core import Tokens
from sglang_pic.core.checkpoints import Checkpoints, _names

GRID, CHUNK = 64, 8192


def text(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 49_152, count).astype(np.int32)


HEAD, LAST_WORDS = text(1, 2000), text(2, 300)


def behind(clock: int, task: int) -> Tokens:
    return np.concatenate([text(clock, 20), HEAD, text(task, 1500)])


def test_words_have_one_name_wherever_they_stand() -> None:
    assert np.array_equal(_names(np.concatenate([text(3, 77), HEAD]))[77:], _names(HEAD))
    assert len(np.unique(_names(HEAD))) == len(HEAD) - 31


def test_a_place_is_known_behind_another_clock_before_any_prompt_parts_there() -> None:
    checkpoints = Checkpoints(GRID, CHUNK)
    assert [checkpoints.choose(behind(30, task), 0, None) for task in (40, 41)] == [None, 1984]
    fork = 2020 - 2020 % GRID
    assert checkpoints.choose(behind(31, 42), 0, None) == fork
    assert checkpoints.choose(behind(31, 43), fork, None) is None
    assert checkpoints.choose(behind(32, 44), 0, None, namespace=7) is None


def test_the_next_turn_leaves_a_prompt_as_the_one_before() -> None:
    """Each turn is put in front of the same last words, where a state would be of no use."""
    checkpoints, turns, places = Checkpoints(GRID, CHUNK), text(5, 3000), []
    for turn in range(4):
        prompt = np.concatenate([turns[: 500 * (turn + 1)], LAST_WORDS])
        places.append(checkpoints.choose(prompt, 448 * turn, None))
    assert places[2:] == [1500 - 1500 % GRID, 2000 - 2000 % GRID]


def test_a_state_at_the_end_stays_where_the_next_turn_goes_on_from_there() -> None:
    checkpoints, whole = Checkpoints(GRID, CHUNK), text(6, 6000)
    assert [checkpoints.choose(whole[: 1000 * turn], 960 * (turn - 1), None) for turn in range(1, 6)] == [None] * 5
    # A fork near the beginning is worth less than the end.
    other = np.concatenate([whole[:200], text(7, 5000)])
    assert checkpoints.choose(other, 0, None) is None
    assert checkpoints.choose(other[:5000], 0, 192) == 192, "SGLang's own choice stands where nothing pays more"
