"""Arithmetic on ascending, disjoint, half-open spans `[start, end)`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Span", "intersect", "subtract"]

Span = tuple[int, int]


def intersect(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """What both cover, ascending; O(len(left) * len(right)), both are short."""
    common = [(max(a, c), min(b, d)) for a, b in left for c, d in right]
    return sorted(span for span in common if span[0] < span[1])


def subtract(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """What `left` covers and `right` does not, ascending."""
    rest: list[Span] = []
    for span_start, end in left:
        start = span_start
        for hole_start, hole_end in sorted(right):
            if hole_end <= start or hole_start >= end:
                continue
            if start < hole_start:
                rest.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            rest.append((start, end))
    return rest
