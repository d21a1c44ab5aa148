"""Donors whose rows HiCache keeps in host memory: found, locked, and given back when a pass has read them.

The tree evicts rows from the device at the end of paths first, so a path is on the device up to some token and on the
host from there on. A splice reads the host's rows where they are (`Splicer.fetch`): nothing is loaded back into the
tree, and no slot beside the request's own is taken.

A device lock can end when the copy is queued, because whoever reuses a slot writes it from a later pass on the same
stream. Host memory is written from another stream, so the locks of a batch that fetches end when its pass has read
them. That is told as SGLang tells it of its own loads: by an acknowledgement in the controller's queue, which all ranks
take out in the same round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature
from sglang_pic.adapter.serve.rows import OnDevice, OnHost
from sglang_pic.adapter.sglang.seams import Tree
from sglang_pic.core import Tokens, as_tokens


class BackedPath(NamedTuple):
    """A path of which the host has all rows, up to the end of a node that begins at `start`."""

    namespace: Namespace
    tokens: Tokens
    """With the token behind the rows where the tree names a row by the next token, too."""
    start: int
    slots: torch.Tensor
    """Of the host: `[num_tokens]` int64."""
    pages: list[str]
    """SGLang's hash of each page and all before it."""


class HostTier(Feature):
    """The host's side of a tree with HiCache; it is the `HostRows` of its server.

    Args:
        tree: SGLang's tree, whose controller is attached.
        token_bytes: what a token's rows take, for SGLang's metrics of loads.
        window: tokens of a window in the tree, if windows have a pool of their own.
    """

    fault = Fallback.FAULT_STORE

    def __init__(self, tree: Tree, token_bytes: int, window: int | None = None) -> None:
        self._tree, self.token_bytes = tree, token_bytes
        self._window = 0 if window is None else window
        self._held: deque[tuple[object, ExitStack]] = deque()

    def find(self, match: Any) -> OnHost:
        """What a match found on the host, behind its rows on the device."""
        node, core = match.last_device_node, self._tree.tree_core
        if match.best_match_node == node:
            return OnHost(node)
        if self._window:
            # For SGLang a match on the device ends with a whole window there. Other rows may go on.
            (path,) = core.collect_path_info([match.best_match_node])
            node = next((each.node_id for each in reversed(path) if each.full_value_len is not None), node)
        transfer, _ = core.build_load_back_spec(match.best_match_node)
        return OnHost(node, transfer.host_indices, transfer.nodes_to_load)

    def lock(self, found: OnHost, locks: ExitStack) -> None:
        """Keep the rows where they are until `locks` is closed.

        NOTE: each node, because SGLang drops the host's copy of any that another request loads back meanwhile.
        """
        core = self._tree.tree_core
        for node in found.nodes:
            locks.callback(core.dec_host_lock_ref, node, core.inc_host_lock_ref(node).to_dec_params())

    def wait_for_loads(self, stream: Any, donors: Sequence[OnDevice]) -> None:
        """Have the stream wait for the loads that write rows of donors: the tree names their slots before that.

        For other loads SGLang's passes wait layer by layer. The donors must be locked.
        """
        acks = self._tree.cache_controller.ack_load_queue
        read = {node for donor in donors for node in self._nodes(*donor)} if acks else set()
        for ack in acks:
            if any(not read.isdisjoint(self._end_of(end, ack.num_tokens)) for end in ack.node_ids):
                stream.wait_event(ack.finish_event)

    def _end_of(self, node: Any, num_tokens: int) -> set[Any]:
        """The nodes of the last tokens of a path: a load is of these, and of no more than all loads of its ack.

        A load of window rows is of the last window, whatever else it loads.
        """
        num_tokens = max(num_tokens, self._window)
        (path,) = self._tree.tree_core.collect_path_info([node])
        return self._nodes(node, path[-1].path_end - num_tokens, path[-1].path_end)

    def _nodes(self, node: Any, start: int, end: int) -> set[Any]:
        """The nodes of tokens `[start, end)` of the path to a node."""
        (path,) = self._tree.tree_core.collect_path_info([node])
        return {info.node_id for info in path if info.path_start < end and start < info.path_end}

    def hold(self, locks: ExitStack, num_tokens: int, events: tuple[Any, Any]) -> None:
        """Close `locks` when the work of the current stream between two events is done on all ranks.

        Args:
            locks: of the donors that it reads.
            num_tokens: that it fetches.
            events: recorded before and after it.
        """
        from sglang.srt.managers.cache_controller import HiCacheAck

        started, finished = events
        ack = HiCacheAck(
            start_event=started,
            finish_event=finished,
            node_ids=[],
            num_tokens=num_tokens,
            num_tokens_by_pool={"kv": num_tokens},
            num_bytes=num_tokens * self.token_bytes,
        )
        self._tree.cache_controller.ack_load_queue.append(ack)
        self._held.append((ack, locks))

    def give_back(self) -> None:
        """Close the locks of what has been taken out of the controller's queue."""
        waiting = {id(ack) for ack in self._tree.cache_controller.ack_load_queue}
        while self._held and id(self._held[0][0]) not in waiting:
            self._held.popleft()[1].close()

    def path_to(self, node_id: int) -> BackedPath | None:
        """The path to a node; None where the host has not all of it. Cost O(path)."""
        core = self._tree.tree_core
        (path,) = core.collect_path_info([node_id])
        specs = [core.build_storage_backup_spec(info.node_id, False) for info in path]
        if None in specs:
            return None
        # Neighbours have the token between them in common where rows are named by two.
        parts = [np.frombuffer(spec.token_ids, np.int64)[: len(spec.host_value)] for spec in specs]
        parts.append(np.frombuffer(specs[-1].token_ids, np.int64)[len(specs[-1].host_value) :])
        return BackedPath(
            Namespace(*core.prefetch_anchor_info(node_id)),
            as_tokens(np.concatenate(parts)),
            path[-1].path_start,
            torch.cat([spec.host_value for spec in specs]),
            [page for spec in specs for page in spec.hash_value],
        )

    @property
    def num_held(self) -> int:
        """Passes that hold rows of the host."""
        return len(self._held)

    def on_flush(self) -> None:
        for _, locks in self._held:
            locks.pop_all()
        self._held.clear()
