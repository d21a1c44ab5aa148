"""Slots that start-up checks borrow: disjoint, off the padding page, and empty when they go back."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import rope_models as models
import torch

from sglang_pic.adapter.probe.slots import PoolTooSmallError, borrow_slots
from sglang_pic.runtime import view_pool
from sglang_pic.runtime.views import PoolView


@pytest.fixture(params=[1, 16])
def view(request: pytest.FixtureRequest) -> PoolView:
    return view_pool(models.MHATokenToKVPool(size=96, page_size=request.param, dtype=torch.bfloat16))


def test_sets_are_disjoint_and_leave_the_padding_page_alone(view: PoolView) -> None:
    row = torch.arange(50, dtype=torch.int32)
    with borrow_slots(view, 3, 20, row) as slots:
        taken = torch.cat(slots).tolist()
    assert len(set(taken)) == 60
    assert view.page_size <= min(taken) <= max(taken) < view.num_slots
    assert all(int(one[0]) % view.page_size == 0 for one in slots)


def test_a_pool_too_small_says_how_large_it_must_be(view: PoolView) -> None:
    before, needed = [buffer.clone() for buffer in view.keys], 99 if view.page_size == 1 else 144
    with (
        pytest.raises(PoolTooSmallError, match=rf"^a KV pool of 96 tokens .* --max-total-tokens {needed} or more\.$"),
        borrow_slots(view, 3, 33, torch.arange(50, dtype=torch.int32)),
    ):
        raise AssertionError("nothing was lent")
    assert all(map(torch.equal, before, view.keys))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_saved_and_no_garbage_is_left(view: PoolView, *, fails: bool) -> None:
    """Rows are empty afterwards, whatever was in the pool before: nobody owns them, and a NaN would spread."""
    row, buffers = torch.arange(50, dtype=torch.int32), (*view.keys, *view.values)
    with borrow_slots(view, 3, 20, row) as slots:
        borrowed = torch.cat(slots)
    before = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer[borrowed[:7]] = float("nan")
    with pytest.raises(RuntimeError) if fails else nullcontext(), borrow_slots(view, 3, 20, row) as slots:
        assert torch.equal(torch.cat(slots), borrowed)
        row[:20] = 99
        for buffer in buffers:
            buffer[borrowed] = float("nan")
        if fails:
            raise RuntimeError
    assert row.tolist() == list(range(50))
    for buffer, old in zip(buffers, before, strict=True):
        assert not buffer[borrowed].any()
        others = torch.ones(len(buffer), dtype=torch.bool)
        others[borrowed] = False
        assert torch.equal(buffer[others], old[others])
