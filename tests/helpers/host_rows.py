"""HiCache around a test's tree: SGLang's own controller and file store over a host pool that knows what its slots
hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName, SidecarPoolSpec
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _evict_swa_for_device_alloc
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_pic.adapter.features.hicache import store
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.hicache.store import HiCacheStore
from tests.helpers.builders import hooks_of

_ROW_BYTES = 96


class HostRows(LogicalHostPool):
    """Copies what a device's slots hold, as the test keeps it by slot."""

    size_per_token = 1

    def __init__(self, device_rows: dict[int, Any], size: int, page_size: int) -> None:
        super().__init__(size, page_size)
        self.layer_num, self.end_layer, self.device_rows = 1, 1, device_rows
        self.rows: dict[int, Any] = {}
        self.beside: HostRows | None = None
        """The pool of index keys, or of a draft's rows: what a slot has there is its row again."""
        self.decode: Callable[[bytes], Any] = bytes
        """Makes a row of what a store keeps of it."""

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
        self.check_beside(host.tolist())

    def check_beside(self, slots: list[int]) -> None:
        """What stands beside rows that are read is theirs."""
        if self.beside is not None:
            assert [self.beside.rows.get(slot) for slot in slots] == [self.rows.get(slot) for slot in slots]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        assert flat
        rows = [json.dumps(self.rows.get(slot)).encode() for slot in range(int(index), int(index) + self.page_size)]
        assert max(map(len, rows)) <= _ROW_BYTES
        return torch.frombuffer(bytearray(b"".join(row.ljust(_ROW_BYTES) for row in rows)), dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(_ROW_BYTES * self.page_size, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        rows = data_page.view(self.page_size, _ROW_BYTES).numpy()
        self.rows.update(enumerate(map(self.decode, map(bytes, rows)), int(index)))


def attach_host(
    tree: Any,
    device_rows: dict[int, Any],
    size: int,
    write_policy: str,
    windows: tuple[dict[int, Any], int] | None = None,
    *,
    has_side_pool: bool = False,
) -> HostRows:
    """What `init_hicache` does for a server, with a host of `size` slots; returns the host's pool.

    `windows` are the rows in the device's pool for windows, and the slots of the host's.
    """
    allocator = tree.token_to_kv_pool_allocator
    pool = HostRows(device_rows, size, allocator.page_size)
    device_pool = SimpleNamespace(device="cpu", layer_num=1, register_layer_transfer_counter=lambda _: None)
    if windows is not None:
        device_pool.full_to_swa_index_mapping = allocator.get_kvcache().full_to_swa_index_mapping
    allocator.get_kvcache = lambda: device_pool
    entries = [PoolEntry(PoolName.KV, pool, device_pool, lambda layer: layer, is_primary_index_anchor=True)]
    if windows is not None:
        window_pool = HostRows(*windows, allocator.page_size)
        own: Any = allocator.swa_attn_allocator
        entries.append(
            PoolEntry(
                PoolName.SWA,
                window_pool,
                device_pool,
                lambda layer: layer,
                host_evict_fn=lambda size: tree.evict_host(size, ComponentType.SWA),
                device_evict_fn=lambda size: _evict_swa_for_device_alloc(tree, size),
                device_alloc_fn=own.alloc,
                device_free_fn=own.free,
            )
        )
        tree.components[ComponentType.SWA]._swa_kv_pool_host = window_pool
    if has_side_pool:
        pool.beside = HostRows(device_rows, size, allocator.page_size)
        entries.append(PoolEntry(PoolName.INDEXER, pool.beside, device_pool, lambda layer: layer))
        tree.register_sidecar_pool(SidecarPoolSpec(PoolName.INDEXER, PoolName.KV))
    tree.host_pool_group = HostPoolGroup(entries)
    form: Any = {"write_policy": write_policy, "io_backend": "direct"}
    tree.cache_controller = HybridCacheController(
        *(allocator, tree.host_pool_group, allocator.page_size, None, threading.Event()), **form
    )
    tree.components[ComponentType.FULL]._full_kv_pool_host = pool
    tree.tree_core.set_hicache_enabled()
    if windows is not None:
        tree.tree_core.has_swa_host_pool = True
    tree.host_memory_mode, tree.load_back_threshold = "cache", 10
    tree.write_through_threshold = 1 if write_policy == "write_through" else 2
    tree.is_write_back = write_policy == "write_back"
    window = None if windows is None else tree.swa_retain_window
    tree.features.append(HostTier(tree, pool.size_per_token, window))
    return pool


def file_store(folder: Path) -> HiCacheFile:
    """SGLang's own, of a server with one rank."""
    return HiCacheFile(_storage_config(folder))


def _storage_config(folder: Path) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        **dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False),
        model_name="rows",
        extra_config={"file_storage_path": str(folder)},
    )


def attach_store(tree: Any, folder: Path) -> None:
    """What SGLang and our factory do for a server with a file store, hooks included."""
    controller = tree.cache_controller
    controller.storage_config, controller.storage_backend = _storage_config(folder), file_store(folder)
    controller.storage_host_pool = controller.mem_pool_host.anchor_entry.host_pool
    for entry in controller.mem_pool_host.entries:
        controller.storage_backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
    controller.prefetch_threshold = tree.prefetch_threshold = 32
    controller.prefetch_capacity_limit, controller.prefetch_tokens_occupied = controller.mem_pool_host.size // 2, 0
    controller.enable_storage = tree.enable_storage = True
    controller._start_storage_threads()
    tree.prefetch_stop_policy = "wait_complete"
    tree.prefetch_timeout_base, tree.prefetch_timeout_per_page = 20.0, 0.0
    tree.features.append(HiCacheStore(tree, lambda: b"rows", publication=tree.publication))
    with pytest.MonkeyPatch.context() as patch:
        hooks = hooks_of(patch, store)
        tree.store.install()
    for target, function in hooks.items():
        name = target.rpartition(".")[2]
        if hasattr(controller, name):
            setattr(controller, name, partial(function, getattr(type(controller), name), controller))
