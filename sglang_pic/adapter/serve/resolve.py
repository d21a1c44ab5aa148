"""Resolves donors in the radix tree: matching a donor's path again proves that its rows are resident.

The match refreshes the path's age; a lock keeps the rows until they have been copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.rows import NOTHING, HostRows, OnDevice, OnHost, Rows, WindowRows
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.core import Path, RowNames, Span, intersect_spans


class _Resident(NamedTuple):
    """A matched path: how many leading tokens are resident, the slots of those on the device, int64, and its lock."""

    length: int
    slots: torch.Tensor
    on_host: OnHost
    """The rows after them."""
    unlock: Callable[[], object]
    node: Any
    """The tree's node at the end of `slots`."""
    holes: Sequence[Span] = ()
    """Spans whose window rows were evicted."""


class ResolveError(Exception):
    """Resolving a donor failed; see its cause."""


class TreeResolver:
    """The `Resolver` of one request's plans, for donors of any `Namespace`.

    It locks them until `keep_locks_of` or `release`. Rows on the host are resident, too. A tree for a draft model of
    EAGLE's kind identifies a row by its token and the next one, so the last token of a path has no row.
    """

    def __init__(
        self,
        tree: Tree,
        names: RowNames,
        host: HostRows | None = None,
        windows: WindowRows | None = None,
        *,
        media: TextOnly | None = None,
    ) -> None:
        self._tree, self._names, self._host, self._windows = tree, names, host, windows
        self._media = media or TextOnly()
        self._found: dict[Path, _Resident] = {}

    def __call__(self, path: Path, end: int) -> int:
        """How many leading tokens of `path` are resident; may stop at `end`.

        Raises:
            ResolveError: matching or locking failed.
        """
        known = self._found.get(path)
        if known is not None and known.length >= end:
            return known.length
        with _looking_up(path):
            return self._find(path, end, known)

    def _find(self, path: Path, end: int, known: _Resident | None) -> int:
        # The tree matches whole pages: match to the end of the last token's page. A path that is resolved again has
        # several runs: it is matched to its end, once.
        page_size, beyond = self._names
        wanted = -(-(end - beyond) // page_size) * page_size + beyond
        tokens = path.tokens(min(wanted, len(path)) if known is None else None)
        namespace = path.namespace
        assert isinstance(namespace, Namespace), "publication.py names namespaces"
        key = RadixKey(self._media.ids(tokens), namespace.extra_key, cache_salt=namespace.cache_salt)
        result = self._tree.match_prefix(MatchPrefixParams(key=key))
        slots = self._tree.path_device_indices(result.last_device_node)[: result.device_prefix_len].to(torch.int64)
        on_host = NOTHING if self._host is None else self._host.find(result)
        num_rows = len(slots) + len(on_host.slots)
        length, unlock = num_rows + beyond if num_rows else 0, self._lock(result, on_host)
        found = _Resident(length, slots, on_host, unlock, result.last_device_node)
        # NOTE: the path is locked at every moment, and has exactly one lock if an exception is raised.
        self._found[path] = found
        if known is not None:
            known.unlock()
        if self._windows is not None:
            self._found[path] = found._replace(holes=self._windows.holes(key, num_rows))
        return found.length

    def _lock(self, match: MatchResult, on_host: OnHost) -> Callable[[], object]:
        """Lock the rows of a match, on the device and on the host; returns the function that unlocks them."""
        unlock = partial(self._tree.unlock, self._tree.lock(match.last_device_node))
        if self._host is None or not on_host.nodes:
            return unlock
        with ExitStack() as locks:
            locks.callback(unlock)
            self._host.lock(on_host, locks)
            return locks.pop_all().close

    def num_on_host(self, path: Path, start: int, end: int) -> int:
        """How many rows of `[start, end)` of a path, resolved up to `end`, are on the host."""
        return end - max(start, min(end, len(self._found[path].slots)))

    def missing(self, path: Path, start: int, end: int) -> list[Span]:
        """The parts of `[start, end)` of a path, resolved up to `end`, whose window rows were evicted."""
        return intersect_spans(self._found[path].holes, start, end)

    def rows(self, path: Path, start: int, end: int) -> Rows:
        """The slots of the rows `[start, end)` of a path, resolved up to `end`.

        Raises:
            ResolveError: locking window rows failed.
        """
        with _looking_up(path):
            return self._rows(path, start, end)

    def _rows(self, path: Path, start: int, end: int) -> Rows:
        found = self._found[path]
        slots, on_host = found.slots, found.on_host
        num_slots = len(slots)
        assert end <= num_slots + len(on_host.slots), (num_slots, len(on_host.slots), start, end)
        here, there = slots[start:end], on_host.slots[max(0, start - num_slots) : max(0, end - num_slots)]
        rows = Rows(here, OnDevice(found.node, start, start + len(here)), there)
        if self._windows is None:
            return rows
        assert not self.missing(path, start, end), "the planner leaves holes out"
        with ExitStack() as both:
            self._windows.lock(found.node, start, end, both)
            window_slots = self._windows.slots(rows.slots)
            both.callback(found.unlock)
            self._found[path] = found._replace(unlock=both.pop_all().close)
        return rows._replace(window_slots=window_slots)

    def keep_locks_of(self, paths: list[Path]) -> ExitStack:
        """The locks of `paths`, each once, which the caller closes; all others are released."""
        kept, locks = set(paths), ExitStack()
        for path in list(self._found):
            found = self._found.pop(path)
            if path in kept:
                locks.callback(found.unlock)
            else:
                found.unlock()
        return locks

    def release(self) -> None:
        """Release all locks."""
        self.keep_locks_of([]).close()


@contextmanager
def _looking_up(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ResolveError(f"a donor's path of {len(path)} tokens: {error}") from error
