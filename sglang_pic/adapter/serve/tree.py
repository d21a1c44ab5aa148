"""`PicRadixCache`: SGLang's radix tree, which notifies this package of inserted, released and flushed rows."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache import base_prefix_cache as base
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pic.adapter.probe.window_slots import free_slots
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.state import is_apart, keep_apart
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import merge_spans


class PicRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache, which publishes to a chunk index."""

    def __init__(self, stations: Stations, params: Any) -> None:
        self.publication, self.features = stations.publication, stations.features
        self._eligibility, self._faults, self._recovery = stations.eligibility, stations.faults, stations.recovery
        self.num_weights = 0
        """How often the weights changed."""
        self._inserted: list[tuple[base.InsertResult, int]] | None = None
        super().__init__(params)

    def reset(self) -> None:
        """Empty the tree and the index, on a flush or a change of weights."""
        super().reset()
        self.publication.flush()
        for feature in self.features:
            feature.on_flush()
        self._faults.flush()

    def make_room(self) -> bool:
        """Have a feature return slots or release locks on rows; False if none has any."""
        for feature in self.features:
            try:
                if feature.make_room(self):
                    return True
            except Exception as error:
                self._recovery.recover((), feature.fault, error)
                return True
        return False

    def change_weights(self) -> None:
        """Forget all donors: their rows were computed with other weights, even if SGLang keeps them as prefixes."""
        self.num_weights += 1
        self.publication.flush()
        for feature in self.features:
            with self._recovery.guarded(feature.fault):
                feature.on_weights(self)

    def match_prefix(self, params: base.MatchPrefixParams) -> base.MatchResult:
        """Match as SGLang does; a request that waited while splicing was switched off gets no spliced rows."""
        req = params.req
        if req is not None and not is_apart(req) and (reason := self._eligibility.diversion(req.pic)) is not None:
            req.pic.diverted = reason
            keep_apart(req)
            params.key.extra_key = req.extra_key
        result: base.MatchResult = super().match_prefix(params)
        return result

    def evictable_size(self) -> int:
        """Evictable slots: the tree's, and those that features borrowed."""
        return int(super().evictable_size()) + self.features.num_slots

    def full_evictable_size(self) -> int:
        """The same of the main pool, if windows have a pool of their own."""
        return int(super().full_evictable_size()) + self.features.num_slots

    def swa_evictable_size(self) -> int:
        """The same of the pool for windows."""
        return int(super().swa_evictable_size()) + self.features.num_slots

    def evict_for_alloc(self, params: base.EvictParams, **kwargs: Any) -> base.EvictResult:
        """Evict as SGLang does; if that is not enough, features return borrowed slots and release locks."""
        free, free_windows = free_slots(self)
        wanted, wanted_windows = free + params.num_tokens, free_windows + params.swa_num_tokens

        def lacking() -> base.EvictParams | None:
            free, free_windows = free_slots(self)
            lacks = max(0, wanted - free), max(0, wanted_windows - free_windows)
            return base.EvictParams(num_tokens=lacks[0], swa_num_tokens=lacks[1]) if any(lacks) else None

        result = super().evict_for_alloc(params, **kwargs)
        while lacking() is not None:
            before, _ = free_slots(self)
            if not self.make_room():
                break
            result.num_tokens_evicted += free_slots(self)[0] - before
            if (rest := lacking()) is not None:
                result.num_tokens_evicted += super().evict_for_alloc(rest).num_tokens_evicted
        return result

    def insert(self, params: base.InsertParams) -> base.InsertResult:
        """Insert as SGLang does; records the adopted rows for `checkpoint_into_tree`."""
        params.track_adopted_ranges |= self.supports_swa()
        result = super().insert(params)
        if self._inserted is not None:
            self._inserted.append((result, len(params.key)))
        return result

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Insert the request's rows into the tree, then publish them."""
        self._inserted = []
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            if self._inserted and not self.is_outdated(req):
                self._publish(req, *self._inserted[0])
        finally:
            self._inserted = None

    def _publish(self, req: Req, result: base.InsertResult, path_len: int) -> None:
        refusal = self._eligibility.refusal(req)
        # NOTE: splicing was switched off on its way. The tree gives its spliced rows to others once it is on again.
        is_marked = refusal is Fallback.SWITCHED and bool(req.pic.spliced)
        if refusal is None or is_marked:
            with self._recovery.guarded(Fallback.FAULT_PUBLICATION, [req]):
                adopted = {"adopted_from": result.prefix_len, "adopted_again": adopted_again(result)}
                self.publication.publish(req, path_len, donates=refusal is None, **adopted)

    def flush_pending_backups(self) -> None:
        """Apply waiting publications: SGLang calls this after the answers of a batch were sent."""
        super().flush_pending_backups()
        with self._recovery.guarded(Fallback.FAULT_PUBLICATION):
            self.publication.settle()

    def is_outdated(self, req: Req) -> bool:
        """Whether the weights changed since the request was received: it neither donates nor pins."""
        return bool(req.pic.epoch.num_weights != self.num_weights)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Notify features of a finished request, and reset its state."""
        super().on_release(req, checkpointed=checkpointed)
        if checkpointed and not isinstance(req.finished_reason, FINISH_ABORT | None):
            for feature in self.features:
                with self._recovery.guarded(feature.fault, [req]):
                    feature.on_released(req, self)
        req.pic.release_row()


def adopted_again(result: base.InsertResult) -> list[tuple[int, int]]:
    """The spans that an insertion found in the tree and gave new rows on the device.

    They were on the host only, or had lost their window rows. In the latter case the tree adopts the new window rows,
    and the others too unless its own are locked.
    """
    adopted = result.adopted_ranges or {}
    spans = merge_spans(span for part in (ComponentType.SWA, ComponentType.FULL) for span in adopted.get(part, []))
    return [(start, min(end, result.prefix_len)) for start, end in spans if start < result.prefix_len]
