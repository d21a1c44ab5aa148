"""Steps of positions: no row is spliced where its model would have scaled the attention otherwise."""

from __future__ import annotations

from core_builders import index_of, join, plan_of, text
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.core import MOST_REUSE, DropReason, PlanOptions, PositionSteps


@given(
    length=st.integers(1, 12),
    offset=st.integers(0, 3),
    start=st.integers(0, 60),
    count=st.integers(1, 40),
    shift=st.integers(-60, 60),
)
def test_what_crosses_a_step_is_told_by_each_position(
    length: int, offset: int, start: int, count: int, shift: int
) -> None:
    steps, positions = PositionSteps(length, offset), range(max(start, -shift), max(start, -shift) + count)
    crossed = steps.crossed(positions.start, positions.stop, shift)
    assert all(begin < end for begin, end in crossed)
    assert [at for begin, end in crossed for at in range(begin, end)] == [
        at for at in positions if (at + offset) // length != (at + shift + offset) // length
    ]


def test_a_run_ends_where_its_rows_would_be_in_another_step() -> None:
    """The text goes on in the next run; where all of it crosses, it is computed and counted."""
    steps, source = PositionSteps(200, offset=1), text(1, 700)
    index = index_of(source)
    options = PlanOptions(policy=MOST_REUSE, steps=(steps,))
    free = plan_of(index, text(2, 150), source, text(3, 20))
    assert max(run.num_tokens for run in free.runs) > 500
    plan = plan_of(index, text(2, 150), source, text(3, 20), options=options)
    assert len(plan.runs) > 1
    for run in plan.runs:
        for at in range(run.donor_start, run.donor_end):
            assert (at + 1) // 200 == (at + run.shift + 1) // 200
    none = plan_of(index, text(2, 300), join(source, text(3, 20)), options=options)
    assert none.runs == ()
    assert none.dropped[DropReason.POSITION_STEP] > 0
