"""Slots of the KV pool that start-up checks borrow before the first request, and leave empty.

Owns the layout of borrowed slots, and what is left of a check: nothing in their rows, nor in the page-table row they
are read through. It must not know what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_pic.runtime.views import PoolView

__all__ = ["borrow_slots", "leave_empty", "needed_tokens"]


def borrow_slots(view: PoolView, num_sets: int, num_tokens: int) -> list[torch.Tensor]:
    """Disjoint sets of slots behind the padding page, each on pages of its own, in order, as backends with pages need.

    Nothing is allocated: the pool must hold nobody's rows yet.

    Returns:
        `num_sets` tensors `[num_tokens]` int64 on the pool's device; none where the pool is too small.
    """
    stride = _whole_pages(view, num_tokens)
    if view.page_size + num_sets * stride > view.num_slots:
        return []
    index = torch.arange(num_tokens, dtype=torch.int64, device=view.device)
    return [index + view.page_size + number * stride for number in range(num_sets)]


def needed_tokens(view: PoolView, num_sets: int, num_tokens: int) -> int:
    """The smallest pool that `borrow_slots` can borrow from, in tokens."""
    return num_sets * _whole_pages(view, num_tokens)


@contextmanager
def leave_empty(view: PoolView, slots: Sequence[torch.Tensor], row: torch.Tensor) -> Iterator[None]:
    """Clear the rows of `slots`, and restore what one set may have overwritten of the page-table row `row`."""
    borrowed, num_tokens = torch.cat(list(slots)), max(map(len, slots))
    table = row[:num_tokens].clone()
    try:
        yield
    finally:
        row[:num_tokens] = table
        # NOTE: zeros, as SGLang makes a pool: a kernel that reads beyond a sequence's end and multiplies what it finds
        # by 0 would spread a NaN. Nothing is saved, since these are nobody's rows: captured graphs write their padding
        # to the first page, which is not borrowed, and a copy in device memory may not fit beside the pool.
        for buffer in (*view.keys, *view.values):
            buffer.view(torch.uint8)[borrowed] = 0


def _whole_pages(view: PoolView, num_tokens: int) -> int:
    return -(-num_tokens // view.page_size) * view.page_size
