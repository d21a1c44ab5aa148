"""Rows of layers with sliding windows in a pool of their own: which of them the tree still has, and locks on them.

In SGLang 0.5.23 (`mem_cache/allocator/swa.py`, `mem_cache/unified_cache/components/swa.py`):

- A token has a slot in both pools. The table from one to the other is written when slots are allocated, and cleared
  when the window slot is freed, which may be long before the other slot is.
- A node of the tree has all of its window rows or none. If the window pool is short, the tree evicts those of the least
  recently used node and keeps its other rows: a hole in the path. So are rows that left a decoding request's window.
- A prefix matches up to the end of a complete window; earlier window rows may be missing.
- A lock on a node locks all rows of its path, but only its last window.
- With HiCache a node's window rows go to the host with its others, and leave the device before them: a path has rows on
  the device whose window rows are on the host.
- By default a prefill frees window rows as soon as they leave the window. A donor would have its last window only, so
  `keep_rows` has SGLang keep them in the tree, where unused ones are evicted first.

Computing only the last window of each run would not do: a row of a window layer depends on the whole window before it
in the layers below. At shift 0 a tiny gpt-oss was .4 to 3.4 nats off with up to three windows computed before each gap,
and 3e-12 with all rows spliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

from sglang_pic.adapter.probe.copies import keep_until_read
from sglang_pic.adapter.serve.rows import Found, Piece, Place, Placed, Reads, RowTier
from sglang_pic.adapter.sglang.seams import Tree, WindowTree
from sglang_pic.core import CostModel, Run, Span, intersect_spans, subtract_spans
from sglang_pic.runtime.views import PoolView


class WindowsOnHost(NamedTuple):
    """Window rows `[start, end)` of a path in host memory."""

    start: int
    end: int
    slots: torch.Tensor
    """Slots of the host's pool for windows, int64, in host memory."""


def keep_rows(view: PoolView) -> None:
    """Have SGLang keep window rows of prefills in the tree, unless the operator set this; before a tree is made."""
    if view.windows is None:
        return
    kept = envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS
    if not kept.is_set():
        kept.set(False)


class WindowTier(RowTier):
    """The window rows of a tree's paths beside the other rows.

    Args:
        tree: SGLang's tree.
        slots: the window slot of each slot of the pool, read on the scheduler's stream.
        others: says where the other rows are.
    """

    def __init__(self, tree: WindowTree, slots: torch.Tensor, others: RowTier) -> None:
        self._tree, self._slots, self._others = tree, slots, others

    @classmethod
    def make(cls, tree: WindowTree, view: PoolView, others: RowTier) -> RowTier:
        """The tier of a server; `others` if windows have no pool of their own."""
        return others if view.windows is None else cls(tree, view.windows.slots, others)

    def priced(self, cost: CostModel) -> CostModel:
        return self._others.priced(cost)

    def find(self, tree: Tree, key: RadixKey, match: Any) -> Found:
        found = self._others.find(tree, key, match)
        # Window rows that left the device.
        holes: Sequence[Span] = self._tree.tree_core.swa_tombstone_ranges(key, 0, found.num_rows)
        if not (holes and self._others.has_host):
            return replace(found, holes=holes)
        windows, nodes = self._on_host(match.best_match_node, holes)
        holes = subtract_spans(holes, [(each.start, each.end) for each in windows])
        return replace(found, nodes=[*found.nodes, *nodes], holes=holes, windows=windows)

    def lock(self, found: Found, locks: ExitStack) -> None:
        self._others.lock(found, locks)

    def num_to_fetch(self, found: Found, start: int, end: int) -> int:
        """How many rows of a span are on the host, or their window rows."""
        num_windows = sum(max(0, min(end, each.end) - max(start, each.start)) for each in found.windows)
        return max(num_windows, self._others.num_to_fetch(found, start, end))

    def pieces(self, found: Found, run: Run, shift: int, here: torch.Tensor, locks: ExitStack) -> list[Piece]:
        whole = self._others.pieces(found, run, shift, here, locks)
        return [part for piece in whole for part in self._cut(piece, found.windows, locks)]

    def _cut(self, piece: Piece, there: Sequence[WindowsOnHost], locks: ExitStack) -> Iterator[Piece]:
        """The parts of a piece, cut where its window rows are on the host; those on the device are locked."""
        shift = piece.run.shift
        edges = {piece.start, piece.end, *(edge + shift for each in there for edge in each[:2])}
        for start, end in pairwise(sorted(edge for edge in edges if piece.start <= edge <= piece.end)):
            part, first, last = piece.part(start, end), start - shift, end - shift
            on_host = next((each for each in there if each.start <= first < each.end), None)
            if on_host is not None:
                windows = on_host.slots[first - on_host.start : last - on_host.start]
                yield part._replace(place=max(part.place, Place.WINDOWS_ON_HOST), windows=windows)
            else:
                assert part.place is Place.DEVICE, "a row on the host has its window row there, too"
                lock_windows(self._tree, part.node, first, last, locks)
                yield part._replace(windows=self._slots[part.slots])

    def gather(self, placed: Sequence[Placed], shifts: torch.Tensor) -> Reads:
        reads, here, there = self._others.gather(placed, shifts), list[torch.Tensor](), list[torch.Tensor]()
        for piece, _ in placed:
            assert piece.windows is not None, "each row has a window row"
            keep_until_read(piece.windows)
            (here if piece.place is Place.DEVICE else there).append(piece.windows)
        reads.splice.windows = torch.cat(here) if here else shifts[:0]
        if reads.fetch is not None:
            reads.fetch.windows = torch.cat(there)
        return reads

    def _on_host(self, node: Any, holes: Sequence[Span]) -> tuple[list[WindowsOnHost], list[Any]]:
        """What of `holes` in the path to a node is on the host, ascending, and its nodes."""
        # NOTE: the tree gives host slots of window rows as part of a load, and a load is of a whole window: rows within
        # a window after missing rows are skipped.
        core, window = self._tree.tree_core, self._tree.swa_retain_window
        (path,) = core.collect_path_info([node])
        # Nodes on the host alone that end a whole window; `start` is the end of the last missing rows.
        ends, start = list[Any](), 0
        for each in path:
            if not intersect_spans(holes, each.path_start, each.path_end):
                continue
            if not core.component_has_host_value_only(each.node_id, ComponentType.SWA):
                start = each.path_end
            elif start == 0 or each.path_end - start >= window:
                ends.append(each)
        found = dict[Any, WindowsOnHost]()
        by_id = {each.node_id: each for each in path}
        for each in reversed(ends):
            if each.node_id in found:
                continue
            (load,) = core.build_hicache_transfers(ComponentType.SWA, each.node_id, CacheTransferPhase.LOAD_BACK)
            of_load = [by_id[node_id] for node_id in load.nodes_to_load]
            slots = load.host_indices.split([info.path_end - info.path_start for info in of_load])
            found |= {
                info.node_id: WindowsOnHost(info.path_start, info.path_end, part)
                for info, part in zip(of_load, slots, strict=True)
            }
        return sorted(found.values(), key=lambda part: part.start), [*found]


def lock_windows(tree: Tree, node: Any, start: int, end: int, locks: ExitStack) -> None:
    """Lock the window rows, if there are any, of `[start, end)` on the path to `node` until `locks` is closed.

    The path is locked already.
    """
    if not tree.supports_swa():
        return
    (path,) = tree.tree_core.collect_path_info([node])
    window, locked_end = cast(WindowTree, tree).swa_retain_window, None
    for each in reversed(path):
        overlaps = each.path_start < end and start < each.path_end
        # A lock extends over the nodes before its own until they contain a window.
        if overlaps and (locked_end is None or locked_end - each.path_end >= window):
            locks.callback(tree.unlock, tree.lock(each.node_id))
            locked_end = each.path_end
