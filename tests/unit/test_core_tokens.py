"""Token arrays: what is refused, and how far two of them agree; and the arithmetic of spans of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Span, Tokens, as_tokens, common_len, intersect_spans
from sglang_pic.core.spans import merge_spans, subtract_spans
from sglang_pic.core.tokens import common_suffix_len, require_tokens

few = st.lists(st.integers(0, 3), max_size=60).map(as_tokens)
# Longer than the first blocks that are compared.
long = st.tuples(st.integers(0, 1_500), few).map(lambda parts: np.concatenate([np.full(parts[0], 2, "<i4"), parts[1]]))


@given(few | long, few | long)
def test_common_len_and_common_suffix_len(left: Tokens, right: Tokens) -> None:
    shortest = min(len(left), len(right))
    same = common_len(left, right)
    assert left[:same].tolist() == right[:same].tolist()
    assert same == shortest or left[same] != right[same]
    assert common_suffix_len(left[::-1].copy(), right[::-1].copy()) == same


@pytest.mark.parametrize("tokens", [np.zeros(4), np.zeros((2, 2), "<i4"), np.zeros(8, "<i4")[::2], np.zeros(3, "<i8")])
def test_arrays_that_are_not_tokens_are_refused(tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="use as_tokens"):
        require_tokens(tokens)


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    bounds = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


any_spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def positions(spans: list[Span]) -> set[int]:
    return {i for start, end in spans for i in range(start, end)}


@given(span_lists(), span_lists(), any_spans, st.integers(0, 60), st.integers(0, 60))
def test_span_arithmetic_is_set_arithmetic(
    left: list[Span], right: list[Span], loose: list[Span], start: int, end: int
) -> None:
    clipped, rest, merged = intersect_spans(left, start, end), subtract_spans(left, right), merge_spans(loose)
    assert positions(clipped) == positions(left) & set(range(start, end))
    assert positions(rest) == positions(left) - positions(right)
    assert positions(merged) == positions(loose)
    for spans in (clipped, rest, merged):
        assert spans == sorted(spans)
        assert all(a < b for a, b in spans)
    assert all(first[1] < second[0] for first, second in pairwise(merged)), "merged spans touch"
