"""A plan on its way to the forward pass: its runs keep their donors' slots when it is clipped."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.serve.state import PendingSplice
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
    return PendingSplice(Plan(prefix_len=prefix_len, end=end, runs=runs), slots, locks=[])


@given(splices(), st.data())
def test_clipping_keeps_slots_aligned(splice: PendingSplice, data: st.DataObject) -> None:
    end = data.draw(st.integers(splice.plan.prefix_len + 1, splice.plan.end))
    splice.clip(end)
    assert splice.plan.end == end
    assert [(run.target_start, run.target_end) for run in splice.runs] == [
        (run.target_start, run.target_end) for run in splice.plan.runs
    ]
    for run in splice.runs:
        assert run.shift == 7
        assert run.slots.tolist() == list(range(1000 + run.target_start, 1000 + run.target_end))
