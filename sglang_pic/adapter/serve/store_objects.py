"""Small objects of our own in the stores of HiCache, beside the rows of SGLang's."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pic.core import Objects, PageHash


class _FileObjects:
    """In SGLang's file store, whose keys are names of files; sizes have to be known."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def put(self, key: str, data: bytes) -> None:
        if not self._backend.set(key, torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            raise OSError("the store took no object; it may be full")

    def get(self, key: str, size: int) -> bytes | None:
        # SGLang warns of each key that is not there.
        if not self._backend.exists(key):
            return None
        found = self._backend.get(key, torch.empty(size, dtype=torch.uint8))
        return None if found is None else bytes(found.numpy())

    def has_rows(self, page: PageHash) -> bool:
        return int(self._backend.batch_exists([page.hex()])) == 1


_KINDS: dict[str, type[Objects]] = {"HiCacheFile": _FileObjects}


def objects_of(backend: object) -> Objects | None:
    """The objects of a store of HiCache, or None where it is of another kind: rows are kept there all the same."""
    kind = _KINDS.get(type(backend).__name__)
    return None if kind is None else kind(backend)  # type: ignore[call-arg]
