"""Slots of the KV pool that start-up checks borrow before the first request, and give back as they found them.

Owns the layout of borrowed slots, and the saving and restoring of their rows and of the page-table row they are read
through. It must not know what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_pic.runtime.views import PoolView

__all__ = ["borrow_slots", "needed_tokens", "put_back"]


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
def put_back(view: PoolView, slots: Sequence[torch.Tensor], row: torch.Tensor) -> Iterator[None]:
    """Restore the rows of `slots` and as much of the page-table row `row` as one set may have overwritten."""
    borrowed, num_tokens = torch.cat(list(slots)), max(map(len, slots))
    buffers = [buffer.view(torch.uint8) for buffer in (*view.keys, *view.values)]
    rows, table = [buffer[borrowed] for buffer in buffers], row[:num_tokens].clone()
    try:
        yield
    finally:
        row[:num_tokens] = table
        for buffer, old in zip(buffers, rows, strict=True):
            buffer[borrowed] = old


def _whole_pages(view: PoolView, num_tokens: int) -> int:
    return -(-num_tokens // view.page_size) * view.page_size
