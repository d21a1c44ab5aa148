"""Resolves donors in the radix tree: a donor's path is matched again, which proves that its rows are resident.

The match refreshes the path's age. A lock holds the rows until they have been copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.seams import Tree
from sglang_pic.core import Path, RowNames


class _Resident(NamedTuple):
    """A path that was found: its leading tokens that are there, their slots in int64, and the lock on it."""

    length: int
    slots: torch.Tensor
    lock: object


class ResolveError(Exception):
    """Looking a donor up failed; the cause says how."""


class TreeResolver:
    """The `Resolver` of one request's plans, for donors of any `Namespace`.

    It holds locks until `keep_locks_of` or `release`. A tree for a draft model of EAGLE's kind names a row by its token
    and the next one: of a path that is there the last token has no row.
    """

    def __init__(self, tree: Tree, names: RowNames) -> None:
        self._tree, self._names = tree, names
        self._found: dict[Path, _Resident] = {}

    def __call__(self, path: Path, end: int) -> int:
        """How many leading tokens of `path` are resident; what lies beyond `end` need not be looked at.

        Raises:
            ResolveError: the tree, or our use of it, raised.
        """
        known = self._found.get(path)
        if known is not None and known.length >= end:
            return known.length
        with _looking_up(path):
            return self._find(path, end, known)

    def _find(self, path: Path, end: int, known: _Resident | None) -> int:
        # The tree matches whole pages: ask for the page that holds the last token. A path that is asked for again
        # carries several runs: it is matched to its end, once.
        page_size, beyond = self._names
        wanted = -(-(end - beyond) // page_size) * page_size + beyond
        tokens = path.tokens(min(wanted, len(path)) if known is None else None)
        namespace = path.namespace
        assert isinstance(namespace, Namespace), "publication.py names namespaces"
        token_ids = array("q")
        token_ids.frombytes(tokens.astype(np.int64).data.cast("B"))
        key = RadixKey(token_ids, namespace.extra_key, cache_salt=namespace.cache_salt)
        result = self._tree.match_prefix(MatchPrefixParams(key=key))
        slots = self._tree.path_device_indices(result.last_device_node)[: result.device_prefix_len].to(torch.int64)
        length = slots.shape[0] + beyond if len(slots) else 0
        found = _Resident(length, slots, self._tree.lock(result.last_device_node))
        # NOTE: the path is locked all the time, and an exception finds exactly one lock on it.
        self._found[path] = found
        if known is not None:
            self._tree.unlock(known.lock)
        return found.length

    def slots(self, path: Path, start: int, end: int) -> torch.Tensor:
        """The slots of `[start, end)` on a path that was resolved up to them: `[end - start]`, int64.

        Raises:
            ResolveError: as before.
        """
        with _looking_up(path):
            return self._slots(path, start, end)

    def _slots(self, path: Path, start: int, end: int) -> torch.Tensor:
        found = self._found[path]
        assert end <= len(found.slots), (len(found.slots), start, end)
        return found.slots[start:end]

    def keep_locks_of(self, paths: list[Path]) -> ExitStack:
        """The locks of `paths`, each once, which the caller closes; every other lock is given back."""
        kept, locks = set(paths), ExitStack()
        for path in list(self._found):
            found = self._found.pop(path)
            if path in kept:
                locks.callback(self._tree.unlock, found.lock)
            else:
                self._tree.unlock(found.lock)
        return locks

    def release(self) -> None:
        """Give every lock back."""
        self.keep_locks_of([]).close()


@contextmanager
def _looking_up(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ResolveError(f"a donor's path of {len(path)} tokens: {error}") from error
