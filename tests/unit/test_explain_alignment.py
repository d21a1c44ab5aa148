"""Where two token sequences fall in step again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.explain.alignment import MAX_SEARCH, WINDOW, align, contained_share

few = st.lists(st.integers(0, 3), max_size=60)


def tokens(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@given(few, few, few)
def test_what_is_claimed_is_equal_and_no_farther_than_a_known_alignment(
    old: list[int], new: list[int], tail: list[int]
) -> None:
    """A common tail of a whole window is one place where both are in step, so the answer is at least as near."""
    rest = [7, *range(100, 100 + WINDOW), *tail]
    found = align(tokens(old + rest), tokens(new + rest))
    assert found is not None
    left, right = (old + rest)[found.old_len :], (new + rest)[found.new_len :]
    assert found.same_len >= WINDOW
    assert left[: found.same_len] == right[: found.same_len]
    assert found.old_len + found.new_len <= len(old) + len(new)


@given(few, few)
def test_texts_with_nothing_in_common_are_never_in_step(old: list[int], new: list[int]) -> None:
    assert align(tokens(old), tokens([value + 10 for value in new])) is None


def test_the_end_of_the_prompt_counts_where_there_is_no_window_left() -> None:
    old = tokens([1, 2, 50, 51, 52, 9, 9, 9])
    assert align(old, tokens([3, 50, 51, 52])) == (2, 1, 3)
    assert align(old, tokens([3, 50, 51])) is None, "two tokens are chance"
    assert align(old, tokens([3, 50, 51, 52, 4])) is None, "the prompt goes on otherwise"


def test_work_is_bounded() -> None:
    tail = np.arange(1_000, 2_000, dtype=np.int32)
    far = np.concatenate([np.zeros(MAX_SEARCH, np.int32), tail])
    assert align(far, tail) is None


def test_period_of_one_token_is_in_step_at_once() -> None:
    same = np.full(50_000, 5, np.int32)
    assert align(same, same)[:2] == (0, 0)  # type: ignore[index]


def test_contained_share_counts_covered_tokens() -> None:
    whole = np.arange(100, dtype=np.int32)
    part = np.concatenate([whole[10:30], [500], whole[40:60]]).astype(np.int32)
    assert contained_share(part, whole, 8) == 40 / 41
    assert contained_share(whole[:7], whole, 8) == 0.0
    assert contained_share(part[::-1].copy(), whole, 8) == 0.0
