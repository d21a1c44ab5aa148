"""The arithmetic of plans, on plans built by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import Path, Plan, Run, as_tokens

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


@given(plans())
def test_runs_and_gaps_partition_the_request(plan: Plan) -> None:
    spans = sorted([*plan.gaps, *((run.target_start, run.target_end) for run in plan.runs)])
    assert [position for a, b in spans for position in range(a, b)] == list(range(plan.prefix_len, plan.end))
    assert plan.num_spliced + plan.num_computed == plan.end - plan.prefix_len
    assert plan.num_computed == sum(b - a for a, b in plan.gaps)


@given(plans(), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_truncate_gives_the_longest_head_that_fits(plan: Plan, budget: int, page_size: int) -> None:
    computed = [position for a, b in plan.gaps for position in range(a, b)]

    def allowed(end: int) -> bool:
        in_run = any(run.target_start < end < run.target_end for run in plan.runs)
        aligned = end == plan.end or end % page_size == 0
        fits = sum(1 for position in computed if position < end) <= budget
        return aligned and fits and not in_run and end - 1 in computed

    best = max((end for end in range(plan.prefix_len + 1, plan.end + 1) if allowed(end)), default=None)
    head = plan.truncate(budget, page_size=page_size)
    if plan.num_computed <= budget:
        assert head is plan
    elif best is None:
        assert head is None
    else:
        assert head is not None
        assert (head.prefix_len, head.end) == (plan.prefix_len, best)
        assert head.num_computed <= budget
        assert head.runs == plan.runs[: len(head.runs)]
        tail = plan.tail(best)
        assert head.runs + tail.runs == plan.runs
        assert head.num_computed + tail.num_computed == plan.num_computed


@pytest.mark.parametrize("end", [0, 1, 299, 300, 301, 1_000])
def test_a_path_gives_its_leading_tokens(end: int) -> None:
    assert PATH.tokens(end).tolist() == list(range(end))
    assert not PATH.tokens(end).flags.writeable


def test_equal_paths_are_equal_values() -> None:
    same = Path("a", [as_tokens(range(1_000))])
    assert same == PATH
    assert hash(same) == hash(PATH)
    assert Path("b", [as_tokens(range(1_000))]) != PATH
    assert Path("a", [as_tokens(np.arange(1_000)[::-1])]) != PATH
