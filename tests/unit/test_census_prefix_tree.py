"""The prefix side of the census, against comparing with every earlier path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.census import prefix_tree
from sglang_pic.census.prefix_tree import PrefixTree

# Few different tokens and short paths: they share prefixes of every length, split segments, repeat and extend.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=25)


def tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def common_len(left: list[int], right: list[int]) -> int:
    """The number of leading elements that are equal."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class Model:
    """All paths, and a loop over them."""

    def __init__(self) -> None:
        self.paths: list[list[int]] = []

    def match(self, prompt: list[int]) -> tuple[int, int | None, list[int]]:
        shared = [common_len(prompt, path) for path in self.paths]
        best = max(shared, default=0)
        if best == 0:
            return 0, None, []
        neighbor = max(call for call, length in enumerate(shared) if length == best)
        prefix_len = min(best, len(prompt) - 1)
        return prefix_len, neighbor, self.paths[neighbor][prefix_len:]

    def stored(self, path: list[int]) -> int:
        return max((common_len(path, other) for other in self.paths), default=0)

    def appender(self, path: list[int], position: int) -> int:
        return next(call for call, other in enumerate(self.paths) if common_len(path, other) > position)


@given(PATHS)
def test_it_agrees_with_a_loop_over_all_paths(paths: list[list[int]]) -> None:
    tree, model = PrefixTree(), Model()
    for call, path in enumerate(paths):
        # Prompt and answer part at the middle: answers are stored, prompts are looked up.
        prompt = path[: (len(path) + 1) // 2]
        prefix_len, neighbor, expected = tree.match(tokens(prompt))
        assert (prefix_len, neighbor, expected.tolist()) == model.match(prompt)
        assert tree.insert(tokens(path), call) == model.stored(path)
        model.paths.append(path)
    for path in paths:
        for position in range(len(path)):
            assert tree.appender(tokens(path), position) == model.appender(path, position)


def test_what_is_expected_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "EXPECTED_LEN", 4)
    tree = PrefixTree()
    tree.insert(tokens([1, 2, 3]), 0)
    tree.insert(tokens([1, 2, 3, 4, 5, 6]), 1)
    tree.insert(tokens([1, 2, 3, 4, 5, 6, 7, 8]), 2)
    assert tree.match(tokens([1, 0])).expected.tolist() == [2, 3, 4, 5]


def test_expected_survives_a_split() -> None:
    tree = PrefixTree()
    tree.insert(tokens([1, 2, 3, 4]), 0)
    expected = tree.match(tokens([1, 9])).expected
    tree.insert(tokens([1, 2, 7]), 1)
    assert expected.tolist() == [2, 3, 4]
    assert expected.base is None
