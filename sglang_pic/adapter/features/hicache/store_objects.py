"""Small objects of our own in the stores of HiCache, beside the rows of SGLang's."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any

import torch

from sglang_pic.core import Objects, PageHash


def num_stored(backend: Any, keys: list[str], side_pools: Sequence[Any]) -> int:
    """How many of the first `keys` a store has, each with its page of every side pool.

    Args:
        backend: SGLang's.
        keys: of pages.
        side_pools: SGLang's `PoolTransfer` of each pool whose pages stand beside those of the rows.
    """
    if side_pools:
        return int(backend.batch_exists_v2(keys, side_pools).kv_hit_pages)
    return int(backend.batch_exists(keys))


class _Objects:
    """What stores have in common.

    Args:
        backend: SGLang's.
        config: its configuration: ranks that have rows of their own have objects of their own.
        side_pools: SGLang's specs of the pools whose pages stand beside those of the rows; more may be added.
    """

    def __init__(self, backend: Any, config: Any, side_pools: Sequence[Any]) -> None:
        self._backend, self._side_pools = backend, side_pools
        self._rank = "" if config.is_mla_model else f"-{config.tp_rank}"

    def has_rows(self, page: PageHash) -> bool:
        from sglang.srt.mem_cache.hicache_storage import PoolTransfer

        side_pools = [PoolTransfer(spec.pool_name, hit_policy=spec.hit_policy) for spec in self._side_pools]
        return num_stored(self._backend, [page.hex()], side_pools) == 1


class _FileObjects(_Objects):
    """In SGLang's file store: names of files, which it makes the rank's own; sizes have to be known."""

    def put(self, key: str, data: bytes) -> None:
        if not self._backend.set(key, torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            raise OSError("the store took no object; it may be full")

    def get(self, key: str, size: int) -> bytes | None:
        """As `Objects.get`; something else under its name, or of another size, is an object without content."""
        path = os.path.join(self._backend.file_path, f"{self._backend._get_suffixed_key(key)}.bin")
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        # NOTE: reading a FIFO waits for whoever writes to it, maybe for ever.
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return b""
        found = self._backend.get(key, torch.empty(size, dtype=torch.uint8))
        return None if found is None else bytes(found.numpy())


class _MooncakeObjects(_Objects):
    """In Mooncake's own interface: SGLang's takes addresses of registered memory."""

    def put(self, key: str, data: bytes) -> None:
        code = self._backend.store.put(key + self._rank, data)
        if code:
            raise OSError(f"Mooncake took no object ({code}); it may be full or gone")

    def get(self, key: str, size: int) -> bytes | None:
        return self._backend.store.get(key + self._rank) or None


_KINDS: dict[str, type[_FileObjects | _MooncakeObjects]] = {
    "HiCacheFile": _FileObjects,
    "MooncakeStore": _MooncakeObjects,
}


def objects_of(backend: object, config: object, side_pools: Sequence[object]) -> Objects | None:
    """The objects of a store of HiCache, or None where it is of another kind: rows are kept there all the same."""
    kind = _KINDS.get(type(backend).__name__)
    return None if kind is None else kind(backend, config, side_pools)
