"""Accounts for every slot, lock and index entry of an idle server, as the part `accounting` of `/server_info`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from pic_bench.probe_plugin.invariants import check
from pic_bench.probe_plugin.row_watch import RowWatch, whole_allocator
from sglang_pic.adapter.features.hicache.host_tier import HostTier
from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.sglang.seams import ModelRunner


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of slots, locks and index entries, and the problems found."""

    is_idle: bool
    """No request has a row, and HiCache copies none. Only then everything is accounted for."""
    problems: list[str]
    """Leaked, held or wrong slots, locks and entries, one sentence each."""
    wrong_rows: dict[str, int]
    """Rows that a pass, a splice or this account found wrong since the start, by the kind of error."""
    num_spliced_rows: int
    """Spliced rows that were checked."""
    num_fetched_rows: int
    """Of them, those that were on the host."""
    num_evicted_tokens: int
    """Slots that the tree gave up."""
    num_locks: int
    num_pins: int
    num_borrowed_slots: int
    num_tree_slots: int
    num_index_tokens: int
    num_index_donors: int


class Accountant:
    """Counts the tree's locks and evictions, and makes the accounting."""

    def __init__(self, runner: ModelRunner, watch: RowWatch) -> None:
        self._runner: Any = runner
        self._watch = watch
        self._tree: Any = None
        # By identity; shrinks when the tree unlocks, and when it is emptied.
        self._locks: dict[int, object] = {}
        self._num_evicted = 0

    def on_tree(self, _result: None, tree: object, *_: object, **__: object) -> None:
        """After the tree was made."""
        self._tree = tree

    def on_lock(self, lock: object, *_: object, **__: object) -> None:
        """After the tree has locked a path."""
        if lock is not None:
            self._locks[id(lock)] = lock

    def on_unlock(self, _tree: object, lock: object, *_: object) -> None:
        """Before the tree unlocks a path."""
        self._locks.pop(id(lock), None)

    def on_reset(self, *_: object) -> None:
        """After the tree was emptied: its locks went with it."""
        self._locks.clear()

    def on_evict(self, result: Any, *_: object, **__: object) -> None:
        """After the tree has evicted."""
        self._num_evicted += result.num_tokens_evicted

    def add_part(self, _config: object, parts: dict[str, Any], *_: object) -> None:
        """Before the plugin shows its part of `/server_info`."""
        parts["accounting"] = self.read

    def read(self) -> Accounting:
        """The accounting; on the scheduler's thread."""
        tree, runner, watch = self._tree, self._runner, self._watch
        # HiCache locks the rows that it copies.
        is_copying = tree.ongoing_write_through or tree.ongoing_load_back
        is_idle = len(runner.req_to_token_pool.free_slots) == runner.req_to_token_pool.size and not is_copying
        walk = tree.tree_core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
        index = tree.publication.index
        index.settle()
        problems: list[str] = []
        if is_idle:
            problems += self._check_slots(walk.slot_indices, walk.positions)
            problems += self._check_locks()
            problems += self._check_index(index)
        return Accounting(
            is_idle=is_idle,
            problems=problems,
            wrong_rows=dict(watch.found),
            num_spliced_rows=watch.num_spliced,
            num_fetched_rows=watch.num_fetched,
            num_evicted_tokens=self._num_evicted,
            num_locks=len(self._locks),
            num_pins=len(self._pins.report().held),
            num_borrowed_slots=self._num_borrowed,
            num_tree_slots=len(walk.slot_indices),
            num_index_tokens=index.num_tokens,
            num_index_donors=index.size.num_donors,
        )

    def _check_slots(self, slots: torch.Tensor, positions: torch.Tensor) -> Iterator[str]:
        """Every slot is free, borrowed, or in the tree once with the row that was written for its place."""
        allocator = whole_allocator(self._runner)
        free, borrowed = int(allocator.available_size()), self._num_borrowed
        pages = allocator.get_all_free_pages()
        if len(pages.unique()) != len(pages):
            yield f"{len(pages) - len(pages.unique())} pages are free twice"
        if len(slots.unique()) != len(slots):
            yield f"{len(slots) - len(slots.unique())} slots are in the tree twice"
        if both := int(torch.isin(slots // allocator.page_size, pages).sum()):
            yield f"{both} slots are in the tree and free"
        if free + borrowed + len(slots) != allocator.size:
            yield f"{free} slots free, {borrowed} borrowed, {len(slots)} in the tree: not the pool's {allocator.size}"
        if wrong := self._watch.check_slots(slots, None, positions):
            yield f"{wrong} slots of the tree hold other rows than were written for them"

    @property
    def _num_borrowed(self) -> int:
        return int(self._tree.features.num_slots)

    @property
    def _pins(self) -> Pins:
        pins: Pins = self._tree.features.find(Pins)
        return pins

    def _check_locks(self) -> Iterator[str]:
        """Only pins hold locks, and they lock the slots that they report."""
        tree = self._tree
        pins = self._pins.report()
        # One, and where windows have a pool of their own one for each part of them.
        stacks: list[Any] = [pin.locks for pin in self._pins._pins.values()]
        num_pinned = sum(len(stack._exit_callbacks) for stack in stacks)
        if len(self._locks) != num_pinned:
            yield f"{len(self._locks)} locks are held, {num_pinned} of them by pins"
        if (protected := int(tree.protected_size())) != pins.num_tokens:
            yield f"{protected} slots of the tree are locked, pins hold {pins.num_tokens}"
        if (host := tree.features.find(HostTier)) is not None and (held := host.num_held):
            yield f"{held} passes hold rows of the host"
        if not pins.held:
            try:
                tree.sanity_check()
            except AssertionError as error:
                yield f"SGLang's check of its tree: {error}"

    def _check_index(self, index: Any) -> Iterator[str]:
        """The index is whole, and rows that are in the tree are its tokens', those of donors computed.

        NOTE: matching a path makes it young in the tree, which only changes what is evicted next.
        """
        try:
            check(index)
        except AssertionError as error:
            yield f"the chunk index: {error}"
        num_wrong = num_spliced = 0
        for leaf in [node for node in index._ages.values() if not node.children]:
            line = leaf.lineage()
            tokens = np.concatenate([node.tokens for node in line]).astype(np.int64)
            slots = self._resident(leaf.trie.namespace, tokens)
            positions = torch.arange(len(slots))
            num_wrong += self._watch.check_slots(slots, torch.from_numpy(tokens[: len(slots)]), positions)
            is_spliced = ~self._watch.is_computed(slots)
            num_spliced += sum(int(is_spliced[start:end].sum()) for node in line for start, end in node.eligible)
        if num_wrong:
            yield f"{num_wrong} resident tokens of the index have other rows"
        if num_spliced:
            yield f"{num_spliced} rows that came from a splice may be donors"

    def _resident(self, namespace: Any, tokens: np.ndarray) -> torch.Tensor:
        """The slots of as much of a path as is in the tree."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        token_ids = array("q")
        token_ids.frombytes(tokens.data.cast("B"))
        key = RadixKey(token_ids, namespace.extra_key, cache_salt=namespace.cache_salt)
        result = self._tree.match_prefix(MatchPrefixParams(key=key))
        slots = self._tree.path_device_indices(result.last_device_node)[: result.device_prefix_len]
        return slots.to(torch.int64)
