"""The arithmetic of token arrays, their spans, plans built by hand, and steps of positions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import (
    MOST_REUSE,
    Exactness,
    Path,
    PositionSteps,
    Span,
    Tokens,
    as_tokens,
    common_len,
    intersect_spans,
)
from sglang_pic.core.plan import DropReason, Plan, PlanOptions, Run
from sglang_pic.core.published import Published, rows_from_store, rows_of_request
from sglang_pic.core.spans import merge_spans, subtract_spans
from sglang_pic.core.tokens import common_suffix_len, require_tokens
from tests.helpers.core_builders import index_of, join, plan_of, text

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
def test_spans_are_sets(left: list[Span], right: list[Span], loose: list[Span], start: int, end: int) -> None:
    clipped, rest, merged = intersect_spans(left, start, end), subtract_spans(left, right), merge_spans(loose)
    assert positions(clipped) == positions(left) & set(range(start, end))
    assert positions(rest) == positions(left) - positions(right)
    assert positions(merged) == positions(loose)
    for found in (clipped, rest, merged):
        assert found == sorted(found)
        assert all(a < b for a, b in found)
    assert all(first[1] < second[0] for first, second in pairwise(merged)), "merged spans touch"


PATH = Path("a", [as_tokens(range(300)), as_tokens(range(300, 1_000))])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    bounds = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=14)))
    prefix_len, *inner, end = bounds
    runs = tuple(
        Run(target_start=a, target_end=b, donor_start=draw(st.integers(0, 500)), donor=PATH, seam_len=0)
        for a, b in zip(inner[::2], inner[1::2], strict=False)
    )
    return Plan(prefix_len=prefix_len, end=end, runs=runs)


@given(plans(), st.data())
def test_clipping_ends_runs_early_and_computes_the_last_token(plan: Plan, data: st.DataObject) -> None:
    end = data.draw(st.integers(plan.prefix_len + 1, plan.end))
    clipped = plan.clip(end)
    assert (clipped.prefix_len, clipped.end) == (plan.prefix_len, end)
    assert clipped.gaps[-1][1] == end
    spliced = {p: p - run.shift for run in plan.runs for p in range(run.target_start, run.target_end)}
    kept = {p: p - run.shift for run in clipped.runs for p in range(run.target_start, run.target_end)}
    assert kept == {p: donor for p, donor in spliced.items() if p < end - 1}


@given(plans(), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_a_cut_is_the_furthest_that_the_budget_allows(plan: Plan, budget: int, page_size: int) -> None:
    end = plan.cut(budget, page_size=page_size)
    assert plan.prefix_len < end <= plan.end
    if plan.num_computed <= budget:
        assert end == plan.end
        return
    computed = {p for a, b in plan.gaps for p in range(a, b)}
    stops = [stop for stop in range(plan.prefix_len + 1, plan.end + 1) if stop % page_size == 0]
    fits = [stop for stop in stops if len([p for p in computed if p < stop]) <= max(budget, 1)]
    assert end == (max(fits) if fits else min(plan.end, plan.prefix_len + page_size))


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 60), st.integers(1, 40), st.integers(-60, 60))
def test_what_crosses_a_step_is_told_by_each(length: int, offset: int, start: int, count: int, shift: int) -> None:
    steps, positions = PositionSteps(length, offset), range(max(start, -shift), max(start, -shift) + count)
    crossed = steps.crossed(positions.start, positions.stop, shift)
    assert all(begin < end for begin, end in crossed)
    assert [at for begin, end in crossed for at in range(begin, end)] == [
        at for at in positions if (at + offset) // length != (at + shift + offset) // length
    ]


def test_a_run_ends_where_its_rows_would_be_in_another_step() -> None:
    """There its model would scale the attention otherwise: the text goes on in the next run, or is computed."""
    steps, source = PositionSteps(200, offset=1), text(1, 700)
    index = index_of(source)
    options = PlanOptions(policy=MOST_REUSE)
    free = plan_of(index, text(2, 150), source, text(3, 20))
    assert max(run.num_tokens for run in free.runs) > 500
    plan = plan_of(index, text(2, 150), source, text(3, 20), options=options, steps=[steps])
    assert len(plan.runs) > 1
    for run in plan.runs:
        for at in range(run.donor_start, run.donor_end):
            assert (at + 1) // 200 == (at + run.shift + 1) // 200
    none = plan_of(index, text(2, 300), join(source, text(3, 20)), options=options, steps=[steps])
    assert none.runs == ()
    assert none.dropped[DropReason.POSITION_STEP] > 0


# [0, 10) matched, [10, 30) computed, [30, 60) spliced behind one changed field, [60, 80) computed.
REQUEST: dict[str, Any] = {
    "matched_len": 10,
    "prefix": Exactness(exact_len=10),
    "spliced": [(30, 60)],
    "generations": [(30, 1)],
}


@pytest.mark.parametrize(
    ("adopted_from", "again", "published"),
    [
        (10, [], Published([(10, 80)], [(30, 60)], [(30, 80)], [(30, 1)])),
        (40, [], Published([(40, 80)], [(40, 60)], [(40, 80)], [(40, 1)])),
        (70, [], Published([(70, 80)], [], [(70, 80)], [(70, 1)])),
        (80, [], None),
        (80, [(0, 10)], None),
        (80, [(50, 70)], Published([], [(50, 60)], [(50, 70)], [(50, 1)])),
        (70, [(20, 40)], Published([(70, 80)], [(30, 40)], [(30, 40), (70, 80)], [(30, 1)])),
    ],
)
def test_a_request_publishes_what_the_tree_adopted(
    adopted_from: int, again: list[tuple[int, int]], published: Published | None
) -> None:
    assert rows_of_request(80, adopted_from, **REQUEST, adopted_again=again) == published


def test_what_is_computed_behind_an_approximate_prefix_is_approximate() -> None:
    request = REQUEST | {"prefix": Exactness(4, 2, 4), "spliced": [], "generations": []}
    assert rows_of_request(80, 0, **request) == Published([(10, 80)], [], [(10, 80)], [])


@pytest.mark.parametrize(
    ("exact_end", "on_device", "published"),
    [
        (5, 0, Published([], spliced=[(10, 40)], generations=[(10, 2)])),
        (25, 0, Published([(10, 25)], spliced=[(25, 40)], generations=[(25, 2)])),
        (90, 0, Published([(10, 40)], spliced=[], generations=[])),
        (90, 30, Published([(30, 40)], spliced=[], generations=[])),
        (25, 30, Published([], spliced=[(25, 40)], generations=[(25, 2)])),
    ],
)
def test_rows_of_a_store_are_donors_as_far_as_they_are_exact(
    exact_end: int, on_device: int, published: Published
) -> None:
    """Where the tree has rows on the device, too, it is not known which of both will be read."""
    assert rows_from_store(10, 40, exact_end, 2, on_device=on_device) == published
