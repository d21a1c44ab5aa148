"""A plan on its way to the forward pass: its runs keep their donors' slots when its request is admitted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.state import PendingSplice, RequestState
from tests.adapter.builders import splice


@st.composite
def splices(draw: st.DrawFn) -> PendingSplice:
    prefix_len = draw(st.integers(7, 40))
    end = prefix_len + draw(st.integers(2, 300))
    inner = sorted(draw(st.sets(st.integers(prefix_len, end - 1), max_size=10)))
    runs = zip(inner[::2], inner[1::2], strict=False)
    return splice(prefix_len, end, *((start, stop, 7) for start, stop in runs), slots=1000)


@given(splices(), st.data())
def test_admission_clips_the_plan_and_keeps_its_slots_aligned(pending: PendingSplice, data: st.DataObject) -> None:
    end = data.draw(st.integers(pending.plan.prefix_len + 1, pending.plan.end))
    state = RequestState(RequestOptions(), pending=pending)
    assert state.admit(pending.plan.prefix_len, end, first_chunk=True) is pending.plan
    assert pending.plan.end == end
    assert state.spliced == [(run.target_start, run.target_end) for run in pending.plan.runs]
    assert len(pending.sources) == len(pending.plan.runs)
    for run, slots in pending.sources:
        assert run.shift == 7
        assert slots.tolist() == list(range(1000 + run.target_start, 1000 + run.target_end))


def test_the_donors_of_a_plan_are_unlocked_once_whatever_becomes_of_it() -> None:
    """Dropped at admission, taken with nothing left to splice, or left behind by a request that goes."""
    for leave in (
        lambda state: state.drop_plan(Fallback.MEMORY),
        lambda state: (state.admit(0, 10, first_chunk=True), state.take_plan()),
        lambda state: state.release_row(),
    ):
        released: list[str] = []
        pending = splice(0, 60, (10, 40, 10))
        pending.locks.callback(released.append, "donor")
        state = RequestState(RequestOptions(), pending=pending)
        leave(state)
        state.release_row()
        assert (released, state.pending, state.take_plan()) == (["donor"], None, None)
