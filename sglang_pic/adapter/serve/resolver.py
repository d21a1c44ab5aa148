"""Resolves donors in the radix tree: the path is matched again, which proves that its rows are resident.

Owns the locks of one plan. The match refreshes the path's age, and the lock holds its rows until they have been copied.
It must not choose donors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_pic.core import Path

if TYPE_CHECKING:
    from sglang_pic.adapter.serve.cache import PicRadixCache

__all__ = ["TreeResolver"]


class _Resident(NamedTuple):
    """A path that was found: its slots from position 0, and the lock on it."""

    slots: torch.Tensor
    lock: object


class TreeResolver:
    """The callback of one plan; `slots` and `keep_locks_of` serve what the plan chose.

    Args:
        cache: the tree.
        extra_key: the namespace of the request, SGLang's extra key.
        cache_salt: the namespace of the request, SGLang's salt.
    """

    def __init__(self, cache: PicRadixCache, extra_key: str | None, cache_salt: str | None) -> None:
        self._cache = cache
        self._namespace = (extra_key, cache_salt)
        self._found: dict[Path, _Resident] = {}

    def __call__(self, path: Path, end: int) -> int:
        """How many leading tokens of `path` are resident; what lies beyond `end` need not be looked at."""
        known = self._found.get(path)
        if known is not None and len(known.slots) >= end:
            return len(known.slots)
        # The tree matches whole pages: ask for the page that holds the last token. A path that is asked for again
        # carries several runs: it is matched to its end, once.
        page_size = self._cache.page_size
        tokens = path.tokens(min(-(-end // page_size) * page_size, len(path)) if known is None else None)
        result = self._cache.match_path(tokens, *self._namespace)
        if known is not None:
            self._cache.unlock(known.lock)
        slots = self._cache.path_device_indices(result.last_device_node)[: result.device_prefix_len]
        self._found[path] = _Resident(slots, self._cache.lock(result.last_device_node))
        return result.device_prefix_len

    def slots(self, path: Path, start: int, end: int) -> torch.Tensor:
        """The slots of `[start, end)` on a path that was resolved up to `end`: `[end - start]`, int64."""
        slots = self._found[path].slots[start:end]
        assert len(slots) == end - start, (len(slots), start, end)
        return slots.to(torch.int64)

    def keep_locks_of(self, paths: list[Path]) -> list[object]:
        """The locks of `paths`, now the caller's, each once; every other lock is given back."""
        kept = set(paths)
        locks: list[object] = []
        for path, found in self._found.items():
            if path in kept:
                locks.append(found.lock)
            else:
                self._cache.unlock(found.lock)
        self._found.clear()
        return locks
