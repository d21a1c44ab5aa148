"""Resolves donors in the radix tree: matching a donor's path again proves that its rows are resident.

The match refreshes the path's age; a lock keeps the rows until they have been copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.media import TextOnly
from sglang_pic.adapter.serve.rows import OffDevice, Piece, RowTier, WindowRows, cut_pieces
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.core import Path, PositionSteps, RowNames, RowSource, Run, Span, intersect_spans, subtract_spans


class _Resident(NamedTuple):
    """A matched path: how many leading tokens are resident, how many rows are on the device, and its lock."""

    length: int
    num_here: int
    on_host: OffDevice
    """The rows on the host."""
    unlock: Callable[[], object]
    holes: Sequence[Span] = ()
    """Spans without window rows, on the device and on the host."""
    slots: torch.Tensor | None = None
    """Of the rows on the device, int64; None until a plan has the path."""


class ResolveError(Exception):
    """Resolving a donor failed; see its cause."""


class TreeRows(RowSource):
    """The rows of SGLang's tree, for one request's plans and donors of any `Namespace`.

    It locks them until `transfer_locks` or `release`. Rows on the host are resident, too. A tree for a draft model of
    EAGLE's kind identifies a row by its token and the next one, so the last token of a path has no row.
    """

    def __init__(
        self,
        tree: Tree,
        names: RowNames,
        tier: RowTier,
        windows: WindowRows | None = None,
        *,
        media: TextOnly | None = None,
        pinned_len: Callable[[Path], int] | None = None,
        steps: Sequence[PositionSteps] = (),
        whole: Sequence[Span] = (),
    ) -> None:
        super().__init__(steps=steps, whole=whole)
        self._tree, self._names, self._tier, self._windows = tree, names, tier, windows
        self._media, self._pinned_len = media or TextOnly(), pinned_len
        self._found: dict[Path, _Resident] = {}

    def num_resident(self, path: Path, end: int) -> int:
        """As `RowSource`; the rows are locked.

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
        on_host = self._tier.find(result)
        # NOTE: most candidates are left out of the plan, and collecting slots is work for the device.
        (on_path,) = self._tree.tree_core.collect_path_info([on_host.node])
        num_here = sum(each.full_value_len or 0 for each in on_path)
        num_rows = num_here + len(on_host.slots)
        length = num_rows + beyond if num_rows else 0
        holes: Sequence[Span] = ()
        if self._windows is not None:
            holes = self._windows.holes(key, num_rows)
            if holes and self._tier.has_host:
                there, nodes = self._windows.on_host(result.best_match_node, holes)
                on_host = on_host._replace(nodes=[*on_host.nodes, *nodes], windows=there)
                holes = subtract_spans(holes, [(each.start, each.end) for each in there])
        # NOTE: the path is locked at every moment, and has exactly one lock if an exception is raised.
        self._found[path] = _Resident(length, num_here, on_host, self._lock(on_host), holes)
        if known is not None:
            known.unlock()
        return length

    def _lock(self, found: OffDevice) -> Callable[[], object]:
        """Lock the rows of a match, on the device and on the host; returns the function that unlocks them."""
        unlock = partial(self._tree.unlock, self._tree.lock(found.node))
        if not found.nodes:
            return unlock
        with ExitStack() as locks:
            locks.callback(unlock)
            self._tier.lock(found, locks)
            return locks.pop_all().close

    def num_to_fetch(self, path: Path, start: int, end: int) -> int:
        """How many rows of a resident span are on the host, or their window rows."""
        found = self._found[path]
        in_windows = sum(each.num_within(start, end) for each in found.on_host.windows)
        return max(in_windows, end - max(start, min(end, found.num_here)))

    def holes(self, path: Path, start: int, end: int) -> Sequence[Span]:
        """The parts of a resident span without window rows, on the device and on the host."""
        return () if self._windows is None else intersect_spans(self._found[path].holes, start, end)

    def pinned_len(self, path: Path) -> int:
        return 0 if self._pinned_len is None else self._pinned_len(path)

    def pieces(self, run: Run, shift: int) -> list[Piece]:
        """The pieces of a run whose donor is resolved, in order, cut where its rows or their window rows lie elsewhere.

        Args:
            run: of the plan.
            shift: positions by which its keys are rotated.

        Raises:
            ResolveError: locking window rows failed.
        """
        with _looking_up(run.donor):
            return self._pieces(run, shift)

    def _pieces(self, run: Run, shift: int) -> list[Piece]:
        found = self._found[run.donor]
        slots = found.slots
        if slots is None:
            slots = self._tree.path_device_indices(found.on_host.node).to(torch.int64)
            self._found[run.donor] = found._replace(slots=slots)
        windows = None if self._windows is None else self._lock_windows(self._windows, run, slots)
        return cut_pieces(run, shift, slots, found.on_host, windows)

    def _lock_windows(self, rows: WindowRows, run: Run, slots: torch.Tensor) -> torch.Tensor:
        """The window slots of a run's rows on the device, locked with its donor; 0 for those on the host.

        Args:
            rows: the pool for windows.
            run: of the plan.
            slots: of all rows of its donor's path on the device.
        """
        found, start, end = self._found[run.donor], run.donor_start, min(run.donor_end, len(slots))
        assert not self.holes(run.donor, start, run.donor_end), "the planner leaves holes out"
        here = [(start, end)] if start < end else []
        on_host = [(each.start, each.end) for each in found.on_host.windows]
        with ExitStack() as both:
            for first, last in subtract_spans(here, on_host):
                rows.lock(found.on_host.node, first, last, both)
            windows = rows.slots(slots[start:end])
            both.callback(found.unlock)
            self._found[run.donor] = found._replace(unlock=both.pop_all().close)
        return windows

    def transfer_locks(self, paths: list[Path]) -> ExitStack:
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
        self.transfer_locks([]).close()


@contextmanager
def _looking_up(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ResolveError(f"a donor's path of {len(path)} tokens: {error}") from error
