"""Span arithmetic against sets of positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.spans import Span, intersect, subtract


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    bounds = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def positions(spans: list[Span]) -> set[int]:
    return {i for start, end in spans for i in range(start, end)}


@given(span_lists(), span_lists())
def test_span_arithmetic_is_set_arithmetic(left: list[Span], right: list[Span]) -> None:
    assert positions(intersect(left, right)) == positions(left) & positions(right)
    assert positions(subtract(left, right)) == positions(left) - positions(right)
    for spans in (intersect(left, right), subtract(left, right)):
        assert spans == sorted(spans)
        assert all(start < end for start, end in spans)
