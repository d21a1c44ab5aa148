"""Slots of the KV pool for passes without a request, before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang_pic.adapter.probe.window_slots import least_num_slots, map_windows
from sglang_pic.errors import UnsupportedError
from sglang_pic.runtime.views import PoolView


class PoolTooSmallError(UnsupportedError):
    """The KV pool has too few slots to borrow from; the message says how many it needs."""


@contextmanager
def borrow_slots(view: PoolView, num_sets: int, num_tokens: int, row: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Disjoint sets of slots after the padding page, each in order on pages of its own.

    Nothing is allocated, so the pool must have no rows yet. At the end the slots are cleared, and the first
    `num_tokens` entries of the page-table row `row` are restored. A pool for windows lends slots of the same numbers.

    Yields:
        `num_sets` tensors `[num_tokens]` int64 on the pool's device.

    Raises:
        PoolTooSmallError: the pool has too few slots; nothing was written.
    """
    stride = whole_pages(num_tokens, view.page_size)
    num_slots = least_num_slots(view)
    if num_tokens > longest_borrowed(view, num_sets):
        more = "" if view.windows is None else ", and --swa-full-tokens-ratio 1"
        raise PoolTooSmallError(
            f"a KV pool of {num_slots - view.page_size} tokens is too small: give --max-total-tokens "
            f"{num_sets * stride} or more{more}."
        )
    index = torch.arange(num_tokens, dtype=torch.int64, device=view.device)
    slots = [index + view.page_size + number * stride for number in range(num_sets)]
    table = row[:num_tokens].clone()
    with map_windows(view, torch.cat(slots)):
        try:
            yield slots
        finally:
            row[:num_tokens] = table
            # NOTE: zeros, as SGLang makes a pool: a kernel that reads beyond a sequence's end and multiplies by 0 would
            # spread a NaN. The old rows are not saved: no request has any (captured graphs write their padding to the
            # first page, which is not borrowed), and a copy may not fit into memory.
            view.fill(torch.cat(slots), 0)


def longest_borrowed(view: PoolView, num_sets: int) -> int:
    """Most tokens for which `num_sets` sets of slots can be borrowed."""
    num_pages = least_num_slots(view) // view.page_size - 1
    return num_pages // num_sets * view.page_size


def whole_pages(num_tokens: int, page_size: int) -> int:
    """`num_tokens` rounded up to whole pages."""
    return -(-num_tokens // page_size) * page_size
