"""A plan on its way to the forward pass: its runs keep their donors' slots when its request is admitted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.options import RequestOptions
from sglang_pic.adapter.serve.state import PendingSplice, RequestState
from sglang_pic.core import Path, Plan, Run, as_tokens

DONOR = Path("donor", [as_tokens(range(1_000))])


@st.composite
def splices(draw: st.DrawFn) -> PendingSplice:
    prefix_len = draw(st.integers(7, 40))
    end = prefix_len + draw(st.integers(2, 300))
    inner = sorted(draw(st.sets(st.integers(prefix_len, end - 1), max_size=10)))
    runs = tuple(
        Run(target_start=start, target_end=stop, donor_start=start - 7, donor=DONOR, seam_len=0)
        for start, stop in zip(inner[::2], inner[1::2], strict=False)
    )
    slots = [torch.arange(1000 + run.target_start, 1000 + run.target_end) for run in runs]
    return PendingSplice(Plan(prefix_len=prefix_len, end=end, runs=runs), slots)


@given(splices(), st.data())
def test_admission_clips_the_plan_and_keeps_its_slots_aligned(splice: PendingSplice, data: st.DataObject) -> None:
    end = data.draw(st.integers(splice.plan.prefix_len + 1, splice.plan.end))
    state = RequestState(RequestOptions(), pending=splice)
    assert state.admit(splice.plan.prefix_len, end, first_chunk=True) is splice.plan
    assert splice.plan.end == end
    assert state.spliced == [(run.target_start, run.target_end) for run in splice.plan.runs]
    assert len(splice.sources) == len(splice.plan.runs)
    for run, slots in splice.sources:
        assert run.shift == 7
        assert slots.tolist() == list(range(1000 + run.target_start, 1000 + run.target_end))


def test_the_donors_of_a_plan_are_unlocked_once_whatever_becomes_of_it() -> None:
    """Dropped at admission, taken with nothing left to splice, or left behind by a request that goes."""
    runs = (Run(target_start=10, target_end=40, donor_start=0, donor=DONOR, seam_len=0),)
    for leave in (
        lambda state: state.drop_plan(Fallback.MEMORY),
        lambda state: (state.admit(0, 10, first_chunk=True), state.take_plan()),
        lambda state: state.release_row(),
    ):
        released: list[str] = []
        splice = PendingSplice(Plan(prefix_len=0, end=60, runs=runs), [torch.arange(30)])
        splice.locks.callback(released.append, "donor")
        state = RequestState(RequestOptions(), pending=splice)
        leave(state)
        state.release_row()
        assert (released, state.pending, state.take_plan()) == (["donor"], None, None)
