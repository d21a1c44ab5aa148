"""Span arithmetic against sets of positions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core.spans import Span, intersect_spans, merge_spans, subtract_spans


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
