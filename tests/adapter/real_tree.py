"""SGLang's own tree and allocator of slots, for tests of what the plugin makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType


def make_allocator(pool: int, page_size: int) -> Any:
    """SGLang's allocator of `pool` slots on the CPU."""
    kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    sizes = (pool,) if page_size == 1 else (pool, page_size)
    return kind(*sizes, torch.bfloat16, "cpu", None, False)


def tree_params(allocator: Any, *, is_eagle: bool = False) -> CacheInitParams:
    """What a radix tree over these slots is made of; for EAGLE a row is named by the next token, too."""
    return CacheInitParams(
        disable=False,
        req_to_token_pool=SimpleNamespace(),  # type: ignore[arg-type]
        token_to_kv_pool_allocator=allocator,
        page_size=allocator.page_size,
        is_eagle=is_eagle,
        tree_components=(ComponentType.FULL,),
    )
