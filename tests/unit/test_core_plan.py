"""The arithmetic of plans, on plans built by hand."""

from __future__ import annotations

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
    fits = [
        stop
        for stop in range(plan.prefix_len + 1, plan.end + 1)
        if len([p for p in computed if p < stop]) <= max(budget, 1) and stop % page_size == 0
    ]
    assert end == (max(fits) if fits else min(plan.end, plan.prefix_len + page_size))
