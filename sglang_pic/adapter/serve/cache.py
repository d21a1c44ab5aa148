"""`PicRadixCache`: SGLang's radix tree, keyed by content as well.

Owns the joints between the tree and the pure core: a donor is resolved by matching its path in the tree again, locked
until its rows have been copied, and whatever a request computed is published once the tree has adopted it. The tree
decides what stays resident; the planner decides what is reused; this file carries the answers between them. It must
not move rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    zero_match_result,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_pic.adapter.serve.accounting import Fallback, Metrics
from sglang_pic.adapter.serve.options import Mode
from sglang_pic.adapter.serve.resolver import TreeResolver
from sglang_pic.adapter.serve.state import Namespace, PendingSplice, RequestState, is_streaming
from sglang_pic.config import PicConfig
from sglang_pic.core import ContentIndex, CostModel, PlanOptions, Reason, intersect_spans
from sglang_pic.core.invariants import check
from sglang_pic.runtime.splice import Splicer

if TYPE_CHECKING:
    from sglang_pic.adapter.audit.audit import Audit

__all__ = ["PicRadixCache"]


class PicRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache with a chunk index beside it; made by `factory.create_cache`."""

    config: PicConfig
    splicer: Splicer
    index: ContentIndex
    metrics: Metrics
    audit: Audit | None = None
    """Set by the factory where requests are audited."""
    _inserted: list[tuple[InsertResult, int]] | None = None

    def attach(
        self,
        *,
        config: PicConfig,
        splicer: Splicer,
        cost: CostModel | None,
        metrics: Metrics,
        delimiters: frozenset[int],
        max_gaps: int,
        max_sequences: int = 1 << 20,
    ) -> None:
        """Give the cache its other half, once, before the first request.

        Args:
            config: the operator's settings.
            splicer: moves rows of this rank's pool.
            cost: what computing and splicing cost here, or `None` to take every run that is long enough.
            metrics: this rank's counters.
            delimiters: token ids that open or close a message of the chat template.
            max_gaps: most gaps of one request.
            max_sequences: most virtual sequences of one batch.
        """
        self.config, self.splicer, self.metrics = config, splicer, metrics
        self.index = ContentIndex(config.core)
        self._delimiters, self._max_gaps, self._cost = delimiters, max_gaps, cost
        self.max_sequences = max_sequences

    # -- the tree's own calls --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, as the tree does on a flush or a change of weights."""
        super().reset()
        if hasattr(self, "index"):
            self.index.flush()
        if self.audit is not None:
            self.audit.flush()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as SGLang does, but nothing for a request whose namespace was switched off after it was received.

        The test switch `ignore_prefix` turns every hit of an ordinary request into a miss, too.
        """
        result: MatchResult = super().match_prefix(params)
        if params.req is not None and self._ignores_prefix(params.req):
            return zero_match_result(self, result, extra_key=params.req.extra_key)
        return result

    def evictable_size(self) -> int:
        """Tokens that SGLang can have: the tree's, and those that an audit computes."""
        size: int = super().evictable_size()
        return size if self.audit is None else size + self.audit.num_slots

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """Evict as SGLang does; where that is not enough the slots of an audit go back, too."""
        audit = self.audit
        if audit is None or not audit.num_slots:
            return super().evict_for_alloc(params, **kwargs)
        wanted = self.token_to_kv_pool_allocator.available_size() + params.num_tokens
        result = super().evict_for_alloc(params, **kwargs)
        if self.token_to_kv_pool_allocator.available_size() < wanted:
            result.num_tokens_evicted += audit.give_back()
        return result

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert as SGLang does, noting what the tree adopted for the publication that follows."""
        result = super().insert(params)
        if self._inserted is not None:
            self._inserted.append((result, len(params.key)))
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Hand the request's row to the tree, then publish what it computed."""
        self._inserted = []
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            if self._inserted:
                result, path_len = self._inserted[0]
                self._publish(req, path_len, adopted_from=result.prefix_len)
        finally:
            self._inserted = None

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """The row is gone: give back donors that were never copied, forget what the row held."""
        super().on_release(req, checkpointed=checkpointed)
        self.drop_pending(req)
        req.pic.forget_row()

    # -- planning, called by admission -----------------------------------------------------------------------------

    def plan_request(self, req: Any, *, max_gaps: int | None = None) -> None:
        """Plan what the request's row still lacks, and lock the donors; the plan waits in `req.pic.pending`.

        Args:
            max_gaps: what is left of the batch's virtual sequences, where that is less than a request may have.
        """
        self.drop_pending(req)
        state: RequestState = req.pic
        state.dropped = {}
        if self._refusal(req) is not None:
            return
        tokens = _as_tokens(req.full_untruncated_fill_ids)
        if len(tokens) - req.prefix_len <= self.config.core.min_run_tokens:
            return
        testing = state.options.testing
        donors_key = req.extra_key if testing.donors_from is None else testing.donors_from
        resolver = TreeResolver(self, donors_key, req.cache_salt)
        plan = self.index.plan(
            (donors_key, req.cache_salt),
            tokens,
            prefix_len=req.prefix_len,
            options=PlanOptions(
                policy=state.options.policy(self.config.core),
                max_gaps=self._max_gaps if max_gaps is None else max(1, min(self._max_gaps, max_gaps)),
                max_runs=self.config.max_runs,
                compute_from=_logprob_start(req),
                cost=self._cost,
            ),
            resolve=resolver,
        )
        state.dropped = plan.dropped
        slots = [resolver.slots(run.donor, run.donor_start, run.donor_end) for run in plan.runs]
        locks = resolver.keep_locks_of([run.donor for run in plan.runs])
        if plan.runs:
            state.pending = PendingSplice(plan, slots, locks, rotate=testing.rotate, flip=testing.flip_donors)

    def match_path(self, tokens: np.ndarray, extra_key: str | None, cache_salt: str | None) -> MatchResult:
        """Match a path of the core in the tree; refreshes its age."""
        key = RadixKey(array("q", tokens.astype(np.int64).tobytes()), extra_key, cache_salt=cache_salt)
        result: MatchResult = super().match_prefix(MatchPrefixParams(key=key))
        return result

    def pending_of(self, req: Any) -> PendingSplice | None:
        """The request's plan, if it has one that still waits."""
        pending: PendingSplice | None = req.pic.pending
        return pending

    def take_pending(self, req: Any) -> PendingSplice | None:
        """Hand the plan to the forward pass, which owns its locks from here on; `None` where there are no runs left."""
        pending: PendingSplice | None = req.pic.pending
        req.pic.pending = None
        if pending is not None and not pending.plan.runs:
            self.release_locks(pending.locks)
            return None
        return pending

    def drop_pending(self, req: Any, reason: Reason | None = None) -> None:
        """Give the donors of a plan back unused, counting why if there is a reason."""
        pending: PendingSplice | None = req.pic.pending
        if pending is not None:
            req.pic.pending = None
            self.release_locks(pending.locks)
            if reason is not None:
                self.metrics.count_fallback(reason)

    def forgo(self, pending: Sequence[PendingSplice | None]) -> None:
        """Give up the plans of a batch that cannot be narrowed: everything in it is computed.

        The spans stay noted as spliced: computed rows are no donors then, which is safe.
        """
        for splice in pending:
            if splice is not None:
                self.release_locks(splice.locks)
                self.metrics.count_fallback(Fallback.BATCH)

    def release_locks(self, locks: list[object]) -> None:
        """Unlock donors; each receipt is given back once."""
        while locks:
            self.unlock(locks.pop())

    def admit(self, req: Any, *, first_chunk: bool, num_spliced: int) -> None:
        """Note that `[req.prefix_len, req.extend_end)` runs in the next batch, with its plan if it has one."""
        state: RequestState = req.pic
        pending = state.pending
        if first_chunk:
            state.matched_len = req.prefix_len
            reason = self._refusal(req)
            if reason is not None and not req.retracted_stain:
                self.metrics.count_fallback(reason)
        # A waiting request is planned at every attempt to admit it; what its last plan left out counts once.
        for dropped, count in state.dropped.items():
            self.metrics.count_fallback(dropped, count)
        if pending is not None:
            state.spliced += [(run.target_start, run.target_end) for run in pending.plan.runs]
        if req.retracted_stain:
            return
        state.num_chunk_hit += num_spliced
        if self.audit is not None:
            self.audit.draw(req)
        req.cached_tokens += num_spliced
        self.metrics.count_tokens(
            prefix=req.prefix_len if first_chunk else 0,
            chunk=num_spliced,
            computed=req.extend_end - req.prefix_len - num_spliced,
            runs=len(pending.plan.runs) if pending is not None else 0,
        )

    # -- private ---------------------------------------------------------------------------------------------------

    def _publish(self, req: Any, path_len: int, *, adopted_from: int) -> None:
        """Tell the index which rows of this path the request computed itself, and which it got by splicing.

        NOTE: only rows that the tree adopted count. Rows of another request that got there first stay as that
        request published them; ours were freed as duplicates.
        """
        state: RequestState = req.pic
        if state.matched_len is None or self._refusal(req) is not None:
            return
        start = max(adopted_from, state.matched_len)
        if start >= path_len:
            return
        self.index.publish(
            self._namespace(req),
            _as_tokens(req.full_untruncated_fill_ids[:path_len]),
            [(start, path_len)],
            spliced=intersect_spans(state.spliced, start, path_len),
            delimiters=self._delimiters,
        )
        if self.config.testing.check_invariants:
            check(self.index)

    def _refusal(self, req: Any) -> Fallback | None:
        """Why this request neither reuses nor donates, or `None`."""
        has_embeddings = req.input_embeds is not None or req.positional_embed_overrides is not None
        logprob_start = _logprob_start(req)
        is_scored = req.multi_item_delimiter_indices is not None or req.token_indices_to_pool is not None
        in_sink = min(self.config.core.sink_tokens + 1, len(req.origin_input_ids))
        leaves_nothing = logprob_start is not None and logprob_start < in_sink
        for holds, reason in (
            (req.pic.options.mode is Mode.OFF, Fallback.OFF),
            (self.audit is not None and not self.audit.serves(req.pic), Fallback.AUDIT),
            (has_embeddings or req.multimodal_inputs, Fallback.EMBEDDINGS),
            (req.lora_id is not None, Fallback.ADAPTER),
            (leaves_nothing, Fallback.INPUT_LOGPROBS),
            (req.return_hidden_states, Fallback.HIDDEN_STATES),
            (is_scored, Fallback.SCORING),
            (req.session is not None, Fallback.SESSION),
        ):
            if holds:
                return reason
        return None

    def _ignores_prefix(self, req: Any) -> bool:
        state: RequestState = req.pic
        if state.options.mode is Mode.OFF or state.is_diverted or is_streaming(req):
            return False
        is_past = self.audit is not None and not self.audit.serves(state)
        return is_past or (hasattr(self, "config") and self.config.testing.ignore_prefix)

    @staticmethod
    def _namespace(req: Any) -> Namespace:
        return (req.extra_key, req.cache_salt)


def _logprob_start(req: Any) -> int | None:
    """From where on the request wants logprobs, or `None`: those positions have to be computed.

    Of its prompt, or from the prompt's end on: after a retraction its answer so far is prefilled, and SGLang takes the
    logprobs of that again.
    """
    return int(req.logprob_start_len) if req.return_logprob and req.logprob_start_len >= 0 else None


def _as_tokens(token_ids: array[int]) -> np.ndarray:
    """SGLang's token array as the core wants it: int32, contiguous."""
    return np.frombuffer(token_ids, dtype=np.int64).astype(np.int32)
