"""Slots where sliding windows may have a pool of their own: a token then has a slot in both pools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_pic.adapter.probe.copies import to_device
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.runtime.views import PoolView


def least_num_slots(view: PoolView) -> int:
    """Slots of the smallest pool, the padding page included."""
    return view.num_slots if view.windows is None else min(view.num_slots, view.windows.num_slots)


@contextmanager
def map_windows(view: PoolView, slots: torch.Tensor) -> Iterator[None]:
    """Map free slots to those of the same numbers in the pool for windows, if there is one, within the context."""
    if view.windows is None:
        yield
        return
    view.windows.slots[slots] = slots
    try:
        yield
    finally:
        view.windows.slots[slots] = 0


def free_slots(tree: Tree) -> tuple[int, int]:
    """Free slots of the pool, and of the pool for windows; 0 if there is none."""
    allocator: Any = tree.token_to_kv_pool_allocator
    if not tree.supports_swa():
        return allocator.available_size(), 0
    return allocator.full_available_size(), allocator.swa_available_size()


def least_room(tree: Tree) -> int:
    """Slots that every pool has free or can evict."""
    free, free_windows = free_slots(tree)
    if not tree.supports_swa():
        return free + tree.evictable_size()
    return min(free + tree.full_evictable_size(), free_windows + tree.swa_evictable_size())


def alloc_anew(tree: Tree, num_tokens: int) -> torch.Tensor | None:
    """Slots for whole pages of every pool, without a prefix; `None` if there are not enough."""
    allocator: Any = tree.token_to_kv_pool_allocator
    if not tree.supports_swa() or allocator.page_size == 1:
        return allocator.alloc(num_tokens)
    # With pages SGLang has no `alloc` for two pools: allocate as for a request.
    start, end = (torch.tensor([length], dtype=torch.int64) for length in (0, num_tokens))
    there = to_device([0, num_tokens, -1], allocator.device).split(1)
    return allocator.alloc_extend(there[0], start, there[1], end, there[2], num_tokens)
