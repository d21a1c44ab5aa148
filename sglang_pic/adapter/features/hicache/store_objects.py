"""Small objects of our own in the stores of HiCache, beside the rows of SGLang's."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.core import Objects, PageHash


class _Objects:
    """What stores have in common.

    Args:
        backend: SGLang's.
        config: its configuration: ranks that have rows of their own have objects of their own.
    """

    def __init__(self, backend: Any, config: Any) -> None:
        self._backend = backend
        self._rank = "" if config.is_mla_model else f"-{config.tp_rank}"

    def has_rows(self, page: PageHash) -> bool:
        return int(self._backend.batch_exists([page.hex()])) == 1


class _FileObjects(_Objects):
    """In SGLang's file store: names of files, which it makes the rank's own; sizes have to be known."""

    def put(self, key: str, data: bytes) -> None:
        if not self._backend.set(key, torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            raise OSError("the store took no object; it may be full")

    def get(self, key: str, size: int) -> bytes | None:
        # SGLang warns of each key that is not there.
        if not self._backend.exists(key):
            return None
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


def objects_of(backend: object, config: object) -> Objects | None:
    """The objects of a store of HiCache, or None where it is of another kind: rows are kept there all the same."""
    kind = _KINDS.get(type(backend).__name__)
    return None if kind is None else kind(backend, config)
