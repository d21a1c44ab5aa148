"""Admission: SGLang's `PrefillAdder` with a prefill budget that counts computed tokens only.

Owns when a request is planned, how its chunk is cut and what the budgets are charged. KV slots are still reserved for
the whole extend: spliced rows need a place too. It must not know how a plan is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_pic.adapter.serve.accounting import Fallback
from sglang_pic.adapter.serve.cache import PicRadixCache
from sglang_pic.adapter.serve.state import PendingSplice

__all__ = ["PicPrefillAdder"]

_SIGNATURE = inspect.signature(PrefillAdder.__init__)
# Larger than any budget: a limit that must not bind.
_NO_LIMIT = 1 << 40


class PicPrefillAdder(PrefillAdder):
    """One prefill pass of the scheduler, with splices."""

    tree_cache: PicRadixCache
    rem_chunk_tokens: int | None
    rem_input_tokens: int
    chunked_req_limit: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A mixed batch decodes the running requests beside the new ones.
        mixed = _SIGNATURE.bind(self, *args, **kwargs).arguments.get("num_mixed_decode_tokens", 0)
        self.num_sequences = int(mixed)
        """Virtual sequences of the batch so far."""

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Plan the request, then admit it as SGLang does; a request that is not admitted gives its donors back."""
        free = self._free_sequences()
        if free < 1:
            return AddReqResult.OTHER
        self.tree_cache.plan_request(req, max_gaps=free)
        try:
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        finally:
            admitted = bool(self.can_run_list) and self.can_run_list[-1] is req
            if not admitted:
                self.tree_cache.drop_pending(req)
        return result

    def _select_prefill_admission(self, req: Any, **options: Any) -> Any:
        pending = self.tree_cache.pending_of(req)
        if pending is None:
            return super()._select_prefill_admission(req, **options)
        plan = pending.plan
        align = options.get("truncation_align_size") or self.page_size
        if self.rem_chunk_tokens is None:
            end = plan.end
        else:
            end = plan.cut(self.rem_chunk_tokens, page_size=max(align, self.page_size))
        extend_len = end - plan.prefix_len
        whole = end == plan.end
        # SGLang keeps track of one unfinished request, and its own cutting leaves no budget for a second: ours, which
        # gives back what was spliced, can leave less than a page.
        if not whole and (
            options["has_chunked_req"] or self.new_chunked_req is not None or (self.rem_chunk_tokens or 0) < align
        ):
            return AddReqResult.OTHER
        with self._budgets(chunk=_NO_LIMIT if whole else extend_len, spliced=plan.num_spliced):
            admission = super()._select_prefill_admission(req, **options)
        if admission is AddReqResult.NO_TOKEN and pending.locks:
            # The donors' locks may be what fills the pool: the request goes first, its reuse second.
            self.tree_cache.drop_pending(req)
            admission = super()._select_prefill_admission(req, **options)
            if not isinstance(admission, AddReqResult):
                self.tree_cache.metrics.count_fallback(Fallback.MEMORY)
            return admission
        if isinstance(admission, AddReqResult) or whole:
            return admission
        return replace(admission, extend_len=min(admission.extend_len, extend_len))

    def _commit_prefill_admission(self, req: Any, admission: Any, mamba_gap_reserve: int) -> None:
        super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
        self._settle(req, self.tree_cache.pending_of(req), first_chunk=True)

    def add_chunked_req(self, req: Any) -> Any:
        """Continue a chunked request: plan what is left of it, cut the next chunk by computed tokens."""
        self.tree_cache.plan_request(req, max_gaps=self._free_sequences())
        extend_len = self._spliced_chunk_len(req)
        pending = self.tree_cache.pending_of(req)
        if pending is None or extend_len is None:
            rest = super().add_chunked_req(req)
        else:
            with self._budgets(chunk=extend_len, spliced=pending.plan.num_spliced, request_limit=extend_len):
                rest = super().add_chunked_req(req)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._settle(req, pending, first_chunk=False)
        else:
            self.tree_cache.drop_pending(req)
        return rest

    def _spliced_chunk_len(self, req: Any) -> int | None:
        """Tokens of the next chunk with the runs in it; None without a plan, which is dropped where slots are short."""
        pending = self.tree_cache.pending_of(req)
        if pending is None or self.rem_chunk_tokens is None:
            return None
        limit = min(self.rem_chunk_tokens, self.chunked_req_limit or self.rem_chunk_tokens)
        extend_len = pending.plan.cut(limit, page_size=self.page_size) - pending.plan.prefix_len
        # NOTE: SGLang lets a chunked request go on whatever the budget says, as its first chunk was admitted. The slots
        # of a longer chunk, and those that the donors' locks keep from eviction, were not.
        if self.ceil_paged_tokens(extend_len) + self.page_size > self.cur_rem_tokens:
            self.tree_cache.drop_pending(req, Fallback.MEMORY)
            return None
        return extend_len

    def _settle(self, req: Any, pending: PendingSplice | None, *, first_chunk: bool) -> None:
        """Clip the plan to the chunk that was admitted, and give back what its runs were charged."""
        num_spliced = 0
        self.num_sequences += 1
        if pending is not None:
            pending.clip(req.extend_end)
            self.num_sequences += len(pending.plan.gaps) - 1
            num_spliced = pending.plan.num_spliced
            self.rem_input_tokens += num_spliced
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += num_spliced
            self.log_hit_tokens += num_spliced
            self.log_input_tokens -= num_spliced
        self.tree_cache.admit(req, first_chunk=first_chunk, num_spliced=num_spliced)

    def _free_sequences(self) -> int:
        """How many more virtual sequences the attention backends' tables have room for."""
        return self.tree_cache.max_sequences - self.num_sequences

    @contextmanager
    def _budgets(self, *, chunk: int, spliced: int, request_limit: int | None = None) -> Iterator[None]:
        """Let a selection see other limits; what it charges meanwhile stays charged."""
        before = self.rem_chunk_tokens
        limit_before = self.chunked_req_limit
        if before is not None:
            self.rem_chunk_tokens = chunk
        self.rem_input_tokens += spliced
        if request_limit is not None and limit_before is not None:
            self.chunked_req_limit = request_limit
        try:
            yield
        finally:
            if before is not None:
                self.rem_chunk_tokens = before - (chunk - (self.rem_chunk_tokens or 0))
            self.rem_input_tokens -= spliced
            self.chunked_req_limit = limit_before
