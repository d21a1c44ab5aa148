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

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

from sglang_pic.adapter.serve.rows import NO_WINDOWS, OffDevice, WindowRows, WindowsOnHost
from sglang_pic.adapter.sglang.seams import WindowTree
from sglang_pic.core import Run, Span, intersect_spans, subtract_spans
from sglang_pic.runtime.views import PoolView


def keep_rows(view: PoolView) -> None:
    """Have SGLang keep window rows of prefills in the tree, unless the operator set this; before a tree is made."""
    if view.windows is None:
        return
    kept = envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS
    if not kept.is_set():
        kept.set(False)


class WindowRowsInTree(WindowRows):
    """The window rows of a tree's paths.

    Args:
        tree: SGLang's tree.
        slots: the window slot of each slot of the pool, read on the scheduler's stream.
    """

    def __init__(self, tree: WindowTree, slots: torch.Tensor) -> None:
        self._tree, self._slots = tree, slots

    @classmethod
    def make(cls, tree: WindowTree, view: PoolView) -> WindowRows:
        """The window rows of a server."""
        return NO_WINDOWS if view.windows is None else cls(tree, view.windows.slots)

    def find(
        self, key: RadixKey, match: Any, end: int, found: OffDevice, *, has_host: bool
    ) -> tuple[OffDevice, Sequence[Span]]:
        # Window rows that left the device.
        holes: Sequence[Span] = self._tree.tree_core.swa_tombstone_ranges(key, 0, end)
        if not (holes and has_host):
            return found, holes
        there, nodes = self._on_host(match.best_match_node, holes)
        found = found._replace(nodes=[*found.nodes, *nodes], windows=there)
        return found, subtract_spans(holes, [(each.start, each.end) for each in there])

    def take(self, found: OffDevice, run: Run, slots: torch.Tensor, locks: ExitStack) -> torch.Tensor:
        start, end = run.donor_start, min(run.donor_end, len(slots))
        here = [(start, end)] if start < end else []
        for first, last in subtract_spans(here, [(each.start, each.end) for each in found.windows]):
            self.lock(found.node, first, last, locks)
        return self._slots[slots[start:end]]

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

    def lock(self, node: Any, start: int, end: int, locks: ExitStack) -> None:
        (path,) = self._tree.tree_core.collect_path_info([node])
        window, locked_end = self._tree.swa_retain_window, None
        for each in reversed(path):
            overlaps = each.path_start < end and start < each.path_end
            # A lock extends over the nodes before its own until they contain a window.
            if overlaps and (locked_end is None or locked_end - each.path_end >= window):
                locks.callback(self._tree.unlock, self._tree.lock(each.node_id))
                locked_end = each.path_end
