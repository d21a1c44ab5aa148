"""Donors whose rows HiCache keeps in host memory: finds them, locks them, and unlocks them when a pass has read them.

The tree evicts rows from the device at the end of paths first, so the rows of a path are on the device up to some token
and on the host after it. A splice reads the host's rows in place (`Splicer.fetch`): nothing is loaded back into the
tree, and no slot but the request's own is used.

A device lock can end when the copy is queued, because a slot is reused by a later pass on the same stream. Host memory
is written from another stream, so the host locks of a batch end when its pass has read the rows. The pass appends an
acknowledgement to the controller's queue, as SGLang's own loads do, and all ranks take it out in the same round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

from sglang_pic.adapter.features.hicache.drafts_on_host import DraftsOnHost
from sglang_pic.adapter.features.parts import Parts
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.borrowed_slots import longest_borrowed
from sglang_pic.adapter.probe.extend import on_forward_stream
from sglang_pic.adapter.probe.window_slots import map_windows
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature
from sglang_pic.adapter.serve.rows import NO_SLOTS, Found, Piece, Place, Placed, Reads, RowTier, Splice, on_device
from sglang_pic.adapter.sglang.seams import BuildContext, TpGroup, Tree
from sglang_pic.adapter.startup.calibration import time_run
from sglang_pic.core import CostModel, Run, Tokens, as_tokens
from sglang_pic.runtime.fetch import Fetcher
from sglang_pic.runtime.live_pools import view_host_pool
from sglang_pic.runtime.splice import Splicer
from sglang_pic.runtime.window_pool import view_window_host_pools

_FETCHED_ROWS: Final = 2_048


class BackedPath(NamedTuple):
    """A path in the tree whose rows are all on the host."""

    namespace: Namespace
    tokens: Tokens
    """Of the rows, and the token after them where the tree names a row by two tokens."""
    start: int
    """Where the last node of the path begins."""
    num_rows: int
    pages: list[str]
    """SGLang's key of each page."""


@dataclass(slots=True, kw_only=True)
class HostReads(Reads):
    """What a pass reads on a server with HiCache."""

    tier: HostTier
    donors: Sequence[Piece]
    """Whose rows on the device are in the tree."""

    def queue(self, splicers: Sequence[Splicer], locks: ExitStack) -> None:
        device = torch.get_device_module(splicers[0].view.device)
        self.tier.wait_for_loads(device.current_stream(), self.donors)
        Reads.queue(self, splicers, locks)
        if self.fetch is not None:
            assert len(self.tier.fetchers) == len(splicers), "SGLang registers all host pools before it serves"
            self.tier.fetch(self.fetch, locks, (device.Event(), device.Event()))


class HostTier(Feature, RowTier):
    """The host of a tree with HiCache.

    Args:
        tree: SGLang's tree, whose controller is attached.
        token_bytes: bytes of a token's rows, for SGLang's metrics of loads.
        window: window length in tokens, if windows have a pool of their own.
        fetchers: copy rows of the model and of its drafts from the host.
        drafts: their rows on the host.
        fetch_us: measured time to read a row from the host; None without the cost gate.
    """

    fault = Fallback.FAULT_STORE
    has_host = True

    def __init__(
        self,
        tree: Tree,
        token_bytes: int,
        window: int | None = None,
        *,
        fetchers: Sequence[Fetcher] = (),
        drafts: DraftsOnHost | None = None,
        fetch_us: float | None = None,
    ) -> None:
        self._tree, self._token_bytes, self._drafts, self._fetch_us = tree, token_bytes, drafts, fetch_us
        self._window, self.fetchers = 0 if window is None else window, fetchers
        self._held: deque[tuple[object, ExitStack]] = deque()

    @classmethod
    def make(cls, ctx: BuildContext, parts: Parts) -> HostTier | None:
        """Let splices read rows from HiCache's host pool, and measure what a fetch costs."""
        if not ctx.enable_hierarchical_cache:
            return None
        from sglang.srt.mem_cache.hicache_storage import PoolName

        tree, splicer, fetch_us = parts.tree, parts.live.splicer, None
        group = tree.cache_controller.mem_pool_host
        host_pool, index_pool, window = group.anchor_entry.host_pool, None, None
        token_bytes, num_slots = host_pool.size_per_token, host_pool.size
        if splicer.view.index or splicer.view.index_rows:
            index_pool = group.get_pool(PoolName.INDEXER)
            token_bytes += index_pool.size_per_token
        if splicer.view.windows is None:
            host = view_host_pool(host_pool, splicer.view, index_pool)
        else:
            window_pool, window = group.get_pool(PoolName.SWA), tree.swa_retain_window
            token_bytes, num_slots = token_bytes + window_pool.size_per_token, min(num_slots, window_pool.size)
            host = view_window_host_pools(host_pool, window_pool, splicer.view)
        fetchers = [Fetcher(splicer, host)]
        drafts = DraftsOnHost(parts.live.drafts, ctx.params, group, fetchers)
        if parts.cost is not None:
            with on_forward_stream(ctx.tp_worker.model_runner):
                fetch_us = calibrate_fetch(fetchers[0], num_slots, ctx.tp_group)
        return cls(tree, token_bytes, window, fetchers=fetchers, drafts=drafts, fetch_us=fetch_us)

    def priced(self, cost: CostModel) -> CostModel:
        if self._fetch_us is None:
            return cost
        return msgspec.structs.replace(cost, fetched_token_us=max(0.0, self._fetch_us - cost.spliced_token_us))

    def bind_registered(self) -> None:
        """Bind a draft's own host pools, once SGLang has registered all of them."""
        if self._drafts is not None:
            self._token_bytes += self._drafts.bind_registered()

    def find(self, tree: Tree, key: RadixKey, match: Any) -> Found:
        node, core = match.last_device_node, tree.tree_core
        if match.best_match_node == node:
            return on_device(tree, node)
        if self._window:
            # SGLang ends a match on the device with a whole window there; other rows may continue on the device.
            (path,) = core.collect_path_info([match.best_match_node])
            node = next((each.node_id for each in reversed(path) if each.full_value_len is not None), node)
        # NOTE: not `build_load_back_spec`, which is empty while another load has a node of the same window: the donors
        # of rows that are there would be forgotten.
        end, load_back = match.best_match_node, CacheTransferPhase.LOAD_BACK
        (transfer,) = core.build_hicache_transfers(ComponentType.FULL, end, load_back)
        here, slots = on_device(tree, node), transfer.host_indices
        return replace(here, num_rows=here.num_rows + len(slots), slots=slots, nodes=transfer.nodes_to_load)

    def lock(self, found: Found, locks: ExitStack) -> None:
        # NOTE: each node is locked, because SGLang drops the host's copy of a node that another request loads back.
        core = self._tree.tree_core
        for node in found.nodes:
            locks.callback(core.dec_host_lock_ref, node, core.inc_host_lock_ref(node).to_dec_params())

    def num_to_fetch(self, found: Found, start: int, end: int) -> int:
        num_here = found.num_rows - len(found.slots)
        return end - max(start, min(end, num_here))

    def pieces(self, found: Found, run: Run, shift: int, here: torch.Tensor, locks: ExitStack) -> list[Piece]:
        pieces, first = super().pieces(found, run, shift, here, locks), max(run.donor_start, len(here))
        if first < run.donor_end:
            slots = found.slots[first - len(here) : run.donor_end - len(here)]
            pieces.append(Piece(run, first + run.shift, run.target_end, shift, slots, Place.HOST))
        return pieces

    def gather(self, placed: Sequence[Placed], shifts: torch.Tensor) -> HostReads:
        here, there = ([each for each in placed if each[0].place is not other] for other in (Place.HOST, Place.DEVICE))
        num_here, num_there = (sum(len(dst) for _, dst in part) for part in (here, there))
        donors = [piece for piece, _ in here if piece.node is not None]
        reads = HostReads(super().gather(here, shifts[:num_here]).splice, tier=self, donors=donors)
        if there:
            slots = [piece.slots for piece, _ in there if piece.place is Place.HOST]
            dst = torch.cat([dst for _, dst in there]).to(torch.int64)
            reads.fetch = Splice(torch.cat([NO_SLOTS, *slots]), dst, shifts[len(shifts) - num_there :])
        return reads

    def fetch(self, fetch: Splice, locks: ExitStack, events: tuple[Any, Any]) -> None:
        """Copy rows of the host, the model's and its drafts', between two events; keep locks until the second one."""
        started, finished = events
        started.record()
        try:
            for fetcher in self.fetchers:
                fetcher.fetch(fetch.src, fetch.dst, fetch.shifts, fetch.windows)
        finally:
            finished.record()
            self.hold(locks.pop_all(), len(fetch.dst), events)

    def wait_for_loads(self, stream: Any, donors: Sequence[Piece]) -> None:
        """Have a stream wait for loads that write the rows of pieces, which are locked, on the device."""
        # The tree has donors' slots before their rows are written. SGLang's passes wait for other loads layer by layer.
        acks = self._tree.cache_controller.ack_load_queue
        read = set[Any]()
        for piece in donors if acks else ():
            read |= self._nodes(piece.node, piece.start - piece.run.shift, piece.end - piece.run.shift)
        for ack in acks:
            if any(not read.isdisjoint(self._end_of(end, ack.num_tokens)) for end in ack.node_ids):
                stream.wait_event(ack.finish_event)

    def _end_of(self, node: Any, num_tokens: int) -> set[Any]:
        """The nodes of the last `num_tokens` tokens of a path, which one load of an acknowledgement may have written.

        `num_tokens` are those of all its loads. A load of window rows writes the whole last window.
        """
        num_tokens = max(num_tokens, self._window)
        (path,) = self._tree.tree_core.collect_path_info([node])
        return self._nodes(node, path[-1].path_end - num_tokens, path[-1].path_end)

    def _nodes(self, node: Any, start: int, end: int) -> set[Any]:
        """The nodes of tokens `[start, end)` of the path to a node."""
        (path,) = self._tree.tree_core.collect_path_info([node])
        return {info.node_id for info in path if info.path_start < end and start < info.path_end}

    def hold(self, locks: ExitStack, num_tokens: int, events: tuple[Any, Any]) -> None:
        """Close `locks`, of the donors that are read, when the work of the current stream is done on all ranks.

        The work fetches `num_tokens` rows between two `events`, recorded before and after it.
        """
        from sglang.srt.managers.cache_controller import HiCacheAck

        started, finished = events
        ack = HiCacheAck(
            start_event=started,
            finish_event=finished,
            node_ids=[],
            num_tokens=num_tokens,
            num_tokens_by_pool={"kv": num_tokens},
            num_bytes=num_tokens * self._token_bytes,
        )
        self._tree.cache_controller.ack_load_queue.append(ack)
        self._held.append((ack, locks))

    def unlock_read(self) -> None:
        """Close the locks of passes whose acknowledgement was taken out of the controller's queue."""
        waiting = {id(ack) for ack in self._tree.cache_controller.ack_load_queue}
        while self._held and id(self._held[0][0]) not in waiting:
            self._held.popleft()[1].close()

    def path_to(self, node_id: int) -> BackedPath | None:
        """The path to a node; None if some of its rows are not on the host. Cost O(path)."""
        core = self._tree.tree_core
        (path,) = core.collect_path_info([node_id])
        specs = [core.build_storage_backup_spec(info.node_id, False) for info in path]
        if None in specs:
            return None
        # Where rows are named by two tokens, a node and the next one both have the token between them.
        parts = [np.frombuffer(spec.token_ids, np.int64)[: len(spec.host_value)] for spec in specs]
        parts.append(np.frombuffer(specs[-1].token_ids, np.int64)[len(specs[-1].host_value) :])
        return BackedPath(
            Namespace(*core.prefetch_anchor_info(node_id)),
            as_tokens(np.concatenate(parts)),
            path[-1].path_start,
            sum(len(spec.host_value) for spec in specs),
            [page for spec in specs for page in spec.hash_value],
        )

    @property
    def num_held(self) -> int:
        """Passes that have locked rows on the host."""
        return len(self._held)

    def on_flush(self) -> None:
        for _, locks in self._held:
            locks.pop_all()
        self._held.clear()


def calibrate_fetch(fetcher: Fetcher, num_host_slots: int, tp_group: TpGroup | None) -> float:
    """Microseconds to copy a row from the host, on the slowest rank.

    Host and pool must have no rows yet, and the pool is left empty.

    Args:
        fetcher: copies the model's rows.
        num_host_slots: of the host, and of its pool for windows.
        tp_group: the ranks.
    """
    view = fetcher.view
    num_rows = min(_FETCHED_ROWS, num_host_slots, longest_borrowed(view, 1))
    host_slots = torch.arange(num_rows, dtype=torch.int64)
    dst = host_slots.to(view.device) + view.page_size
    shifts = torch.full_like(dst, 7)
    with map_windows(view, dst):
        timing = time_run(lambda: fetcher.fetch(host_slots, dst, shifts, host_slots), view.device, tp_group)
        # What the host had there were no rows.
        view.fill(dst, 0)
    return timing.us / num_rows
