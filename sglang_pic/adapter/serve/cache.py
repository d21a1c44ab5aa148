"""`PicRadixCache`: SGLang's radix tree, which tells the rest of this package what happens to rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache import base_prefix_cache as base
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pic.adapter.namespace import is_strict
from sglang_pic.adapter.seams import Req
from sglang_pic.adapter.serve.accounting import Accounting
from sglang_pic.adapter.serve.auditor import Auditor
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.faults import Faults
from sglang_pic.adapter.serve.host_tier import HostTier
from sglang_pic.adapter.serve.pins import PinEnd, Pins
from sglang_pic.adapter.serve.planning import Planning
from sglang_pic.adapter.serve.publication import Publication
from sglang_pic.adapter.serve.state import is_apart, keep_apart
from sglang_pic.adapter.serve.store import StoreTier

INDEXED_STORE: Final = (
    "A store of HiCache would take index keys of spliced rows for computed ones; start without --radix-cache-backend "
    "pic to attach one."
)


class PicRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache with a chunk index beside it.

    SGLang hands the tree to admission, so what admission needs hangs here: planning, accounting, the auditor, pins.
    """

    def __init__(
        self,
        params: Any,
        *,
        planning: Planning,
        accounting: Accounting,
        auditor: Auditor,
        pins: Pins,
        publication: Publication,
        faults: Faults | None = None,
    ) -> None:
        self.planning, self.accounting, self.auditor, self.pins = planning, accounting, auditor, pins
        self.publication = publication
        self.host: HostTier | None = None
        """Set once HiCache is attached."""
        self.store: StoreTier | None = None
        """Likewise; stays None beside index keys, which a store keeps under SGLang's own keys."""
        self.num_weights = 0
        """How often the weights changed."""
        self.faults = faults or Faults()
        self._inserted: list[tuple[base.InsertResult, int]] | None = None
        super().__init__(params)

    def reset(self) -> None:
        """Forget everything, as the tree does on a flush or a change of weights."""
        super().reset()
        if self.host is not None:
            self.host.flush()
        if self.store is not None:
            self.store.flush()
        self.pins.flush()
        self.publication.flush()
        self.auditor.flush()
        self.faults.flush()

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Attach a store of HiCache's to the running server, if it would tell spliced rows from computed ones."""
        if self.host is not None and self.store is None:
            return False, INDEXED_STORE
        attached: tuple[bool, str] = super().attach_storage_backend(*args, **kwargs)
        return attached

    def recover(
        self,
        reqs: Iterable[Req],
        reason: Fallback,
        error: Exception,
        *,
        is_admitted: bool = False,
        in_pass: bool = False,
    ) -> None:
        """Note a fault, and have requests computed in full.

        Args:
            reqs: those whose reuse failed.
            reason: what failed.
            error: the exception.
            is_admitted: a chunk of them was admitted, and no pass computed it yet.
            in_pass: in the middle of a forward pass.

        Raises:
            Exception: `error` itself, where going on would not help or tensor-parallel ranks would differ.
        """
        for req in reqs:
            req.pic.is_faulty = True
            req.pic.drop_plan()
            if is_admitted:
                self.accounting.undo(req)
        self.accounting.count_fallback(reason)
        self.faults.note(reason, error, in_pass=in_pass)
        is_lost = reason in (Fallback.FAULT_PUBLICATION, Fallback.FAULT_PINS) or not self.publication.is_whole
        if is_lost or self.faults.is_off:
            # NOTE: the index may not know of rows in the tree whether they may be donors, and how many changed fields
            # they have behind them. So later requests do not find those rows.
            self.faults.num_restarts += 1
            self.publication.flush()
            self.pins.abandon()

    def give_back_pin(self, reason: PinEnd) -> bool:
        """Give back the oldest pin, if there is one; its rows can be evicted then."""
        try:
            return self.pins.give_back_oldest(self, reason)
        except Exception as error:
            self.recover((), Fallback.FAULT_PINS, error)
            return True

    def change_weights(self) -> None:
        """Give pins back and forget donors: their rows are of other weights, even if SGLang keeps them as prefixes."""
        self.num_weights += 1
        while self.give_back_pin(PinEnd.WEIGHTS):
            pass
        self.publication.flush()
        if self.store is not None:
            self.store.forget_weights()

    def unload_adapter(self, lora_id: str) -> None:
        """Give back the pins of a LoRA adapter that was unloaded: no request can drop them any more."""
        try:
            self.pins.unload(lora_id, self)
        except Exception as error:
            self.recover((), Fallback.FAULT_PINS, error)

    def match_prefix(self, params: base.MatchPrefixParams) -> base.MatchResult:
        """Match as SGLang does; what waits when splicing is switched off is kept apart from spliced rows."""
        req = params.req
        if req is not None and not is_apart(req) and (reason := self.planning.diversion(req.pic)) is not None:
            req.pic.diverted = reason
            keep_apart(req)
            params.key.extra_key = req.extra_key
        result: base.MatchResult = super().match_prefix(params)
        return result

    def evictable_size(self) -> int:
        """Slots that SGLang can have: the tree's, and those that an audit borrowed."""
        return int(super().evictable_size()) + self.auditor.num_slots

    def full_evictable_size(self) -> int:
        """The same, where windows have a pool of their own."""
        return int(super().full_evictable_size()) + self.auditor.num_slots

    def swa_evictable_size(self) -> int:
        """The same of the pool for windows."""
        return int(super().swa_evictable_size()) + self.auditor.num_slots

    def evict_for_alloc(self, params: base.EvictParams, **kwargs: Any) -> base.EvictResult:
        """Evict as SGLang does; where that is not enough the slots of an audit go back, then pins, oldest first."""
        free, free_windows = self._free_slots()
        wanted, wanted_windows = free + params.num_tokens, free_windows + params.swa_num_tokens

        def missing() -> base.EvictParams | None:
            free, free_windows = self._free_slots()
            lacking = max(0, wanted - free), max(0, wanted_windows - free_windows)
            return base.EvictParams(num_tokens=lacking[0], swa_num_tokens=lacking[1]) if any(lacking) else None

        result = super().evict_for_alloc(params, **kwargs)
        if self.auditor.num_slots and missing() is not None:
            result.num_tokens_evicted += self.auditor.release_slots()
        while (lacking := missing()) is not None and self.give_back_pin(PinEnd.MEMORY):
            result.num_tokens_evicted += super().evict_for_alloc(lacking).num_tokens_evicted
        return result

    def _free_slots(self) -> tuple[int, int]:
        """Of the pool, and of the one for windows if there is one."""
        allocator = self.token_to_kv_pool_allocator
        if not self.supports_swa():
            return allocator.available_size(), 0
        return allocator.full_available_size(), allocator.swa_available_size()

    def loading_check(self, finish_count: int | None = None) -> None:
        """Take note of loads from the host as SGLang does, and of rows that were fetched from there for splices."""
        super().loading_check(finish_count)
        if self.host is not None:
            self.host.give_back()

    def write_backup_storage(self, node_id: int) -> None:
        """Write rows to the store: under SGLang's keys as far as they are those that any server computes for the text.

        NOTE: those keys are made of tokens, the client's key and the salt, so a server without the plugin finds what is
        written under them, and so do requests that want exact rows. What came from a splice, or stands behind it, has
        keys of the plugin's own, where the store is of a kind that it can list.
        """
        extra_key, _ = self.tree_core.prefetch_anchor_info(node_id)
        if self.host is None or is_strict(extra_key):
            if self.store is not None:
                self.store.announce_exact(self.get_last_hash_value(node_id))
            super().write_backup_storage(node_id)
            return
        try:
            path = self.host.path_to(node_id)
            if path is None:
                return
            exact_end = self.publication.exactness(path.namespace, path.tokens).exact_len
            is_exact = exact_end >= len(path.tokens)
            if not is_exact and not self.publication.may_be_shared(path.namespace, path.tokens):
                return
            if not (is_exact if self.store is None else self.store.announce(path, exact_end)):
                return
        except Exception as error:
            self.recover((), Fallback.FAULT_STORE, error)
            return
        super().write_backup_storage(node_id)

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Look for a prefix in the store as SGLang does."""
        # Before SGLang's threads see it.
        if self.store is not None and not self.has_ongoing_prefetch(request):
            self.store.note_prefetch(request, *args, **kwargs)
        return super().prefetch_from_storage(request, *args, **kwargs)

    def _handle_prefetch_result(self, operation: Any) -> None:
        """Put what came from the store into the tree as SGLang does, and publish it."""
        super()._handle_prefetch_result(operation)
        if self.store is not None:
            try:
                self.store.publish(operation)
            except Exception as error:
                self.recover((), Fallback.FAULT_PUBLICATION, error)

    def look_up(self, req: Req) -> None:
        """Look for the text of an arrived request in the store, beside SGLang's own look for its prefix."""
        if self.store is not None:
            try:
                self.store.look_up(req)
            except Exception as error:
                self.recover((), Fallback.FAULT_STORE, error)

    def check_hicache_events(self) -> None:
        """Go on with loads and backups as SGLang does, then with what was looked up in the store."""
        super().check_hicache_events()
        if self.store is not None:
            try:
                self.store.step()
            except Exception as error:
                self.recover((), Fallback.FAULT_STORE, error)

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a request need not wait for the store: for its prefix, nor for its text."""
        is_done: bool = super().check_prefetch_progress(request)
        return is_done and (self.store is None or self.store.is_ready(request))

    def release_aborted_request(self, request: Any) -> None:
        """Forget what was looked up for a request that left, too."""
        super().release_aborted_request(request)
        if self.store is not None:
            self.store.abandon(request)

    def insert(self, params: base.InsertParams) -> base.InsertResult:
        """Insert as SGLang does, noting what the tree adopted for the publication that follows."""
        params.track_adopted_ranges |= self.host is not None or self.supports_swa()
        result = super().insert(params)
        if self._inserted is not None:
            self._inserted.append((result, len(params.key)))
        return result

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Hand the request's row to the tree, then note what it computed."""
        self._inserted = []
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            if self._inserted and self._refused(req) is None:
                result, path_len = self._inserted[0]
                try:
                    self.publication.publish(
                        req, path_len, adopted_from=result.prefix_len, adopted_again=adopted_again(result)
                    )
                except Exception as error:
                    self.recover([req], Fallback.FAULT_PUBLICATION, error)
        finally:
            self._inserted = None

    def flush_pending_backups(self) -> None:
        """Publish what was noted: SGLang calls this after the answers of a batch have left."""
        super().flush_pending_backups()
        try:
            self.publication.settle()
            self.publication.tell(self, self.planning.to_ids)
        except Exception as error:
            self.recover((), Fallback.FAULT_PUBLICATION, error)

    def _refused(self, req: Req) -> PinEnd | None:
        """Why the rows of a request are neither donors nor pinned."""
        if req.pic.num_weights != self.num_weights:
            return PinEnd.WEIGHTS
        return None if self.planning.refusal(req) is None else PinEnd.REFUSED

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Pin the prompt if the request asked for it, and forget what its row held."""
        super().on_release(req, checkpointed=checkpointed)
        is_served = checkpointed and not isinstance(req.finished_reason, FINISH_ABORT | None)
        if is_served and req.pic.options.names_pins:
            try:
                self.pins.settle(req, self, self._refused(req))
            except Exception as error:
                self.recover([req], Fallback.FAULT_PINS, error)
        req.pic.release_row()


def adopted_again(result: base.InsertResult) -> list[tuple[int, int]]:
    """Of what an insertion found in the tree, the spans that have new rows on the device.

    They were on the host only, or had lost their window rows. Of the latter the tree takes the new window rows, and all
    others too unless somebody has locked those that it has.
    """
    adopted = result.adopted_ranges or {}
    spans = adopted.get(ComponentType.SWA) or adopted.get(ComponentType.FULL, [])
    return [(start, min(end, result.prefix_len)) for start, end in spans if start < result.prefix_len]
