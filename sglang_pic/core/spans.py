"""Arithmetic on lists of half-open spans `[start, end)` of token positions, ascending and disjoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

Span = tuple[int, int]
"""Half-open `[start, end)`, in tokens."""

_FAR = 1 << 62


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The same positions as ascending, disjoint, not touching, non-empty spans."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract_spans(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """`spans` without `holes`; both ascending and disjoint. Cost O(len(spans) + len(holes))."""
    rest: list[Span] = []
    first = 0
    for span_start, end in spans:
        start = span_start
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        i = first
        while i < len(holes) and holes[i][0] < end:
            if start < holes[i][0]:
                rest.append((start, holes[i][0]))
            start = max(start, holes[i][1])
            i += 1
        if start < end:
            rest.append((start, end))
    return rest


def holds(spans: Sequence[Span], position: int) -> bool:
    """Whether one of `spans`, ascending and disjoint, contains `position`. Cost O(log(len(spans)))."""
    i = bisect_right(spans, (position, _FAR)) - 1
    return i >= 0 and position < spans[i][1]


def whole_part(spans: Sequence[Span], start: int, end: int) -> Span:
    """`[start, end)` shortened to begin and end inside none of `spans`, ascending and disjoint; may be empty."""
    before, after = (spans[i] if (i := bisect_right(spans, (at, -1)) - 1) >= 0 else (at, at) for at in (start, end))
    first = before[1] if start < before[1] else start
    return first, max(first, after[0] if end < after[1] else end)


def intersect_spans(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The parts of `spans`, ascending and disjoint, inside `[start, end)`. Cost O(log(len(spans)) + result)."""
    parts: list[Span] = []
    if start >= end:
        return parts
    for i in range(bisect_right(spans, start, key=itemgetter(1)), len(spans)):
        span = spans[i]
        if span[0] >= end:
            break
        parts.append((max(span[0], start), min(span[1], end)))
    return parts
