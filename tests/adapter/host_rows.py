"""HiCache around a test's tree: SGLang's own controller over a host pool that knows what its slots hold."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_pic.adapter.serve.host_tier import HostTier


class HostRows(LogicalHostPool):
    """Copies what a device's slots hold, as the test keeps it by slot."""

    size_per_token = 1

    def __init__(self, device_rows: dict[int, Any], size: int, page_size: int) -> None:
        super().__init__(size, page_size)
        self.layer_num, self.end_layer, self.device_rows = 1, 1, device_rows
        self.rows: dict[int, Any] = {}

    def backup_from_device_all_layer_physical(
        self, _: object, host: torch.Tensor, device: torch.Tensor, *__: Any
    ) -> None:
        for here, there in zip(device.tolist(), host.tolist(), strict=True):
            self.rows[there] = self.device_rows.get(here)

    def load_to_device_per_layer_physical(
        self, _: object, host: torch.Tensor, device: torch.Tensor, *__: Any, **___: Any
    ) -> None:
        for here, there in zip(device.tolist(), host.tolist(), strict=True):
            self.device_rows[here] = self.rows[there]


def attach_host(tree: Any, device_rows: dict[int, Any], size: int, write_policy: str) -> HostRows:
    """What `init_hicache` does for a server, with a host of `size` slots; returns the host's pool."""
    allocator = tree.token_to_kv_pool_allocator
    pool = HostRows(device_rows, size, allocator.page_size)
    device_pool = SimpleNamespace(device="cpu", layer_num=1, register_layer_transfer_counter=lambda _: None)
    allocator.get_kvcache = lambda: device_pool
    entry = PoolEntry(PoolName.KV, pool, device_pool, lambda layer: layer, is_primary_index_anchor=True)
    tree.host_pool_group = HostPoolGroup([entry])
    tree.cache_controller = HybridCacheController(
        allocator,
        tree.host_pool_group,
        allocator.page_size,
        None,
        threading.Event(),
        write_policy=write_policy,
        io_backend="direct",
    )
    tree.components[ComponentType.FULL]._full_kv_pool_host = pool
    tree.tree_core.set_hicache_enabled()
    tree.host_memory_mode, tree.load_back_threshold = "cache", 10
    tree.write_through_threshold = 1 if write_policy == "write_through" else 2
    tree.is_write_back = write_policy == "write_back"
    tree.host = tree.planning.host = HostTier(tree, pool.size_per_token)
    return pool
