"""Slots that start-up checks borrow: disjoint, off the padding page, and empty when they go back."""

from __future__ import annotations

import pytest
import rope_models as models
import torch

from sglang_pic.adapter.probe.slots import borrow_slots, leave_empty, needed_tokens
from sglang_pic.runtime import view_pool
from sglang_pic.runtime.views import PoolView


@pytest.fixture(params=[1, 16])
def view(request: pytest.FixtureRequest) -> PoolView:
    return view_pool(models.MHATokenToKVPool(size=96, page_size=request.param, dtype=torch.bfloat16))


def test_sets_are_disjoint_and_leave_the_padding_page_alone(view: PoolView) -> None:
    slots = borrow_slots(view, 3, 20)
    taken = torch.cat(slots).tolist()
    assert len(set(taken)) == 60
    assert view.page_size <= min(taken) <= max(taken) < view.num_slots
    assert all(int(one[0]) % view.page_size == 0 for one in slots)
    assert needed_tokens(view, 3, 20) == (60 if view.page_size == 1 else 96)
    assert borrow_slots(view, 3, 33) == []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_saved_and_no_garbage_is_left(view: PoolView, *, fails: bool) -> None:
    """Rows are empty afterwards, whatever was in the pool before: nobody owns them, and a NaN would spread."""
    slots, row = borrow_slots(view, 3, 20), torch.arange(50, dtype=torch.int32)
    borrowed = torch.cat(slots)
    before = [buffer.clone() for buffer in (*view.keys, *view.values)]
    for buffer in (*view.keys, *view.values):
        buffer[borrowed[:7]] = float("nan")
    try:
        with leave_empty(view, slots, row):
            row[:20] = 99
            for buffer in (*view.keys, *view.values):
                buffer[borrowed] = float("nan")
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert row.tolist() == list(range(50))
    for buffer, old in zip((*view.keys, *view.values), before, strict=True):
        assert not buffer[borrowed].any()
        others = torch.ones(len(buffer), dtype=torch.bool)
        others[borrowed] = False
        assert torch.equal(buffer[others], old[others])
