"""HiCache on the platform: its host pools in ordinary memory, rows copied by plain PyTorch.

SGLang's tree, controller and stores run as they are. Host pools have CUDA pin their memory, and look up the compiled
copies of the io backend `direct` by name in their own modules, where these are bound. A copy is done when it
returns; the events that SGLang asks afterwards are those of `torch.cpu`, which are always done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

IO_BACKEND: Final = "direct"
"""The io backend whose copies are here; the other one is of compiled kernels that are handed addresses."""

RESERVE_BYTES: Final = 1 << 30
"""Memory that host pools leave free; SGLang leaves 10 GiB, which is all of a small machine."""

_POOL_MODULES: Final = tuple(f"sglang.srt.mem_cache.pool_host.{kind}" for kind in ("dsa", "mha", "mla"))


def install() -> None:
    """Bind memory and copies in this process; idempotent."""
    base: Any = import_module("sglang.srt.mem_cache.pool_host.base")
    if hasattr(base.HostKVCache.__init__, "__wrapped__"):
        return
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    index: Any = import_module("sglang.srt.mem_cache.pool_host.dsa")
    keys: Any = import_module("sglang.srt.mem_cache.pool_host.mha")
    for pool in (base.HostKVCache, index.DSAIndexerPoolHost, keys.MHATokenToKOnlyPoolHost):
        pool.__init__ = _without_pinning(pool.__init__)
    for name in _POOL_MODULES:
        module = import_module(name)
        for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
            setattr(module, copy.__name__, copy)


def transfer_kv_direct(
    src_layers: Sequence[Tensor], dst_layers: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy rows between pools that both lie layer by layer, `[num_slots, ...]` each, for all layers given."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        _bytes(target)[dst_indices] = _bytes(source)[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy rows of one layer from `[num_pages, num_layers, page_size, ...]` to `[num_slots, ...]`."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        page, row = src_indices // page_size, src_indices % page_size
        _bytes(target)[dst_indices] = _bytes(source)[page, layer_id, row]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy rows of all layers, `[num_slots, ...]` each, to `[num_pages, num_layers, page_size, ...]`.

    Where there are two targets, keys and values, the first half of the sources is for the first.
    """
    page, row = dst_indices // page_size, dst_indices % page_size
    for target, layers in zip(dst_ptrs, _split(src_ptrs, len(dst_ptrs)), strict=True):
        for layer, source in enumerate(layers):
            _bytes(target)[page, layer, row] = _bytes(source)[src_indices]


def _split(items: Sequence[Tensor], num_parts: int) -> Iterator[Sequence[Tensor]]:
    size = len(items) // num_parts
    return (items[start : start + size] for start in range(0, len(items), size))


def _bytes(rows: Tensor) -> Tensor:
    """FP8 rows cannot be indexed on a CPU; their bytes can."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    """A host pool's initialiser that asks for ordinary memory: there is no device to pin it for."""

    @functools.wraps(original)
    def initialise(pool: object, *args: object, **kwargs: Any) -> None:
        original(pool, *args, **kwargs | {"pin_memory": False})

    return initialise
