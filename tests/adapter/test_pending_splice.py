"""A plan on its way to the forward pass: its gaps, its chunk cuts, its clipping."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.request_state import PendingSplice, RunSource


@st.composite
def splices(draw: st.DrawFn) -> PendingSplice:
    prefix_len = draw(st.integers(0, 40))
    end = prefix_len + draw(st.integers(2, 300))
    inner = sorted(draw(st.sets(st.integers(prefix_len, end - 1), max_size=10)))
    runs = [
        RunSource(start, stop, shift=7, slots=torch.arange(1000 + start, 1000 + stop))
        for start, stop in zip(inner[::2], inner[1::2], strict=False)
    ]
    return PendingSplice(prefix_len, end, runs, locks=[])


def covered(splice: PendingSplice) -> list[tuple[int, int]]:
    return sorted([(r.target_start, r.target_end) for r in splice.runs] + splice.gaps())


@given(splices())
def test_runs_and_gaps_partition_the_extend(splice: PendingSplice) -> None:
    spans = covered(splice)
    assert spans[0][0] == splice.prefix_len
    assert spans[-1][1] == splice.end
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert splice.num_computed == sum(end - start for start, end in splice.gaps())
    assert splice.gaps()[-1][1] == splice.end, "the last token's logits are wanted"


@given(splices(), st.data())
def test_clipping_keeps_slots_aligned_and_computes_the_last_token(splice: PendingSplice, data: st.DataObject) -> None:
    end = data.draw(st.integers(splice.prefix_len + 1, splice.end))
    splice.clip(end)
    assert splice.end == end
    assert splice.gaps()[-1][1] == end
    for run in splice.runs:
        assert run.slots.tolist() == list(range(1000 + run.target_start, 1000 + run.target_end))


@given(splices(), st.integers(1, 200), st.sampled_from([1, 16]))
def test_a_cut_respects_the_computed_budget(splice: PendingSplice, budget: int, page_size: int) -> None:
    whole = splice.num_computed
    end = splice.cut(budget, page_size)
    assert splice.prefix_len < end <= splice.end
    if whole <= budget:
        assert end == splice.end
        return
    assert end % page_size == 0 or end == splice.prefix_len + page_size or end == splice.end
    splice.clip(end)
    # One more token where the cut fell inside a run, one page where the budget is smaller than a page.
    assert splice.num_computed <= max(budget + 1, page_size)
    if page_size == 1:
        assert splice.num_computed >= min(budget, whole) - 1, "the budget is used"
