"""Admission: SGLang's `PrefillAdder` with a prefill budget that counts computed tokens only.

A request is planned when SGLang considers it, its chunk is cut by computed tokens, and the budget charged for its runs
is returned. KV slots are reserved for the whole extend, spliced rows included.

A request whose input or output is found by its tokens' places in the batch (input embeddings, hidden states) never
shares a batch with a plan, so every admitted plan can be executed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.planning import Planning
from sglang_pic.adapter.serve.rows import ResolveError
from sglang_pic.adapter.serve.state import PendingSplice, RequestState, needs_whole_batch
from sglang_pic.adapter.serve.stations import Stations
from sglang_pic.adapter.serve.tree import PicRadixCache
from sglang_pic.adapter.sglang.seams import Req
from sglang_pic.core import num_reads

_SIGNATURE = inspect.signature(PrefillAdder.__init__)
# Larger than any budget: a limit that must not bind.
_NO_LIMIT = 1 << 40


@dataclass(slots=True, eq=False)
class Admission:
    """What all prefill passes of a scheduler rank share."""

    planning: Planning
    stations: Stations
    next_batch_is_whole: bool = False
    """Whether a request of `needs_whole_batch` waits for a batch without splices."""


class PicPrefillAdder(PrefillAdder):
    """One prefill pass of the scheduler, with splices."""

    tree_cache: PicRadixCache
    rem_chunk_tokens: int | None
    rem_input_tokens: int
    chunked_req_limit: int | None

    def __init__(self, shared: Admission, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared, self._planning, self._stations = shared, shared.planning, shared.stations
        # A mixed batch decodes the running requests beside the new ones.
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        mixed = given.get("num_mixed_decode_tokens", 0)
        self.num_sequences = int(mixed)
        """Virtual sequences of the batch so far."""
        decoding = self.running_batch.reqs if mixed else ()
        self.longest = max((len(req.origin_input_ids) + len(req.output_ids) for req in decoding), default=0)
        """Tokens of its longest sequence."""
        self.has_runs = False
        """Whether the batch will be narrowed to its gaps."""
        self.reads_before = 0
        """`num_reads` of what the batch computes so far."""
        self.rem_extend = self._planning.limits.max_extend
        """Tokens that requests with splices may add to the batch, spliced ones included; None for no limit."""
        self.needs_whole_batch = shared.next_batch_is_whole or (
            bool(mixed) and any(map(needs_whole_batch, self.running_batch.reqs))
        )
        """Whether the batch must not be narrowed."""
        chunk = given["rem_chunk_tokens"]
        self.whole_budget = None if chunk is None else chunk - mixed
        """`rem_chunk_tokens` of the empty batch."""
        shared.next_batch_is_whole = False
        self.is_held_up = False
        """Whether an unfinished request waits for room."""
        self._planned_from = 0
        """The first token of the last plan, also if there was nothing to splice."""

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        """Plan the request, then admit it as SGLang does; if it is not admitted its donors are unlocked."""
        if self.is_held_up:
            return AddReqResult.OTHER
        if self.has_runs and needs_whole_batch(req):
            # Nothing is spliced in the next batch, so that this request fits.
            self._shared.next_batch_is_whole = True
            return AddReqResult.OTHER
        # Batches without runs are limited by SGLang alone.
        if self._free_sequences < 1 or (self.has_runs and self._room_for(req) < 1):
            return AddReqResult.OTHER
        result = self._consider(req, has_chunked_req, truncation_align_size)
        while result is AddReqResult.NO_TOKEN and self._would_wait_for_ever(req):
            result = self._consider(req, has_chunked_req, truncation_align_size)
        return result

    def add_chunked_req(self, req: Req) -> Req | None:
        """Continue a chunked request: plan the rest of it, cut the next chunk by computed tokens.

        Beside sliding windows SGLang may find no room for the next chunk. Then its donors are unlocked first, because
        their locks may fill the pool, and if it still has to wait nobody is admitted in this round.
        """
        rest = self._continue(req)
        while not self._has_admitted(req) and self._would_wait_for_ever(req):
            rest = self._continue(req)
        # NOTE: SGLang counts a chunk in flight for the unfinished request of every batch, even where the batch lacks
        # it. Its last chunk would be taken for an earlier one, and the first token of its answer be lost.
        self.is_held_up = not self._has_admitted(req)
        return rest

    def _continue(self, req: Req) -> Req | None:
        self._plan(req)
        extend_len = self._spliced_chunk_len(req)
        pending: PendingSplice | None = req.pic.pending
        if pending is None or extend_len is None:
            rest = super().add_chunked_req(req)
        else:
            with self._budgets(chunk=extend_len, spliced=pending.plan.num_spared, request_limit=extend_len):
                rest = super().add_chunked_req(req)
            if not self._has_admitted(req):
                req.pic.drop_plan(Fallback.MEMORY)
                rest = super().add_chunked_req(req)
        if self._has_admitted(req):
            self._settle(req, first_chunk=False)
        else:
            req.pic.drop_plan()
        return rest

    def _consider(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        self._plan(req, num_to_load=req.host_hit_length)
        try:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        finally:
            if not self._has_admitted(req):
                req.pic.drop_plan()

    def _would_wait_for_ever(self, req: Req) -> bool:
        """Whether no running request can free slots and a feature did; the request is then considered again."""
        is_alone = not self.can_run_list and not self.running_batch.reqs
        return is_alone and self.tree_cache.make_room()

    def _plan(self, req: Req, *, num_to_load: int = 0) -> None:
        """Plan the request after its prefix and `num_to_load` tokens from the host, unless the batch has `BATCH`."""
        # SGLang's count of admitted tokens, less spliced ones (`_settle`).
        num_before = max(0, self.log_input_tokens)
        self._planned_from = req.prefix_len + num_to_load
        try:
            self._planning.plan(
                req,
                self.tree_cache,
                prefix_len=self._planned_from,
                max_gaps=self._room_for(req),
                num_before=num_before,
                reads_before=self.reads_before,
            )
        except Exception as error:
            reason = Fallback.FAULT_RESOLVE if isinstance(error, ResolveError) else Fallback.FAULT_PLAN
            self._stations.recovery.recover([req], reason, error)
        if self.needs_whole_batch:
            req.pic.drop_plan(Fallback.BATCH)

    def _select_prefill_admission(self, req: Req, **options: Any) -> Any:
        admission = self._select(req, **options)
        # SGLang knows one unfinished request: for a second one it forgets the first, and answers after its chunk. Stock
        # cutting leaves no budget for a second one. Ours may: it ends chunks at `rem_extend`, too.
        is_second = options["has_chunked_req"] or self.new_chunked_req is not None
        is_cut = not isinstance(admission, AddReqResult) and admission.is_chunked
        return AddReqResult.OTHER if is_second and is_cut else admission

    def _select(self, req: Req, **options: Any) -> Any:
        if req.prefix_len + options["host_hit_length"] != self._planned_from:
            # Nothing was loaded back after all; behind all that was promised there may have been nothing to plan.
            self._plan(req)
        if self._should_wait(req):
            req.pic.has_waited = True
            return AddReqResult.OTHER
        align = options.get("truncation_align_size") or self.page_size
        end = self._cut(req, self.rem_chunk_tokens, page_size=max(align, self.page_size))
        pending: PendingSplice | None = req.pic.pending
        if pending is None or end is None:
            return super()._select_prefill_admission(req, **options)
        plan = pending.plan
        extend_len = end - plan.prefix_len
        whole = end == plan.end
        # The budget of spliced tokens is returned, which can leave less than a page.
        left = min(self.rem_chunk_tokens or 0, _NO_LIMIT if self.rem_extend is None else self.rem_extend)
        if not whole and (options["has_chunked_req"] or self.new_chunked_req is not None or left < align):
            return AddReqResult.OTHER
        with self._budgets(chunk=_NO_LIMIT if whole else extend_len, spliced=plan.num_spared):
            admission = super()._select_prefill_admission(req, **options)
        if admission is AddReqResult.NO_TOKEN:
            # The donors' locks may fill the pool: admitting the request is more important than its reuse.
            req.pic.drop_plan(Fallback.MEMORY)
            return super()._select_prefill_admission(req, **options)
        if isinstance(admission, AddReqResult) or whole:
            return admission
        return replace(admission, extend_len=min(admission.extend_len, extend_len))

    def _commit_prefill_admission(self, req: Req, admission: Any, mamba_gap_reserve: int) -> None:
        pending: PendingSplice | None = req.pic.pending
        if pending is not None and pending.plan.prefix_len != req.prefix_len:
            # NOTE: a load may bring more than it promised: rows that are on the device and lack their windows alone.
            # Runs of a plan that begins before them would be written into the tree's slots.
            self._plan(req)
        # SGLang counts the window slots of a chunk up to the budget, which spliced tokens exceed.
        with self._budgets(chunk=max(admission.extend_len, self.rem_chunk_tokens or 0), spliced=0):
            super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
        self._settle(req, first_chunk=True)

    def _should_wait(self, req: Req) -> bool:
        """Whether the request's reordered text would be computed because others have taken most of the batch.

        A request waits once: others may come before it in every round.
        """
        pending: PendingSplice | None = req.pic.pending
        if pending is None or not pending.plan.conditional or not self.can_run_list or req.pic.has_waited:
            return False
        left, whole = self.rem_chunk_tokens, self.whole_budget
        return left is not None and whole is not None and left < pending.plan.num_charged <= whole

    def _cut(self, req: Req, num_computed: int | None, *, page_size: int) -> int | None:
        """The end of a chunk of at most `num_computed` computed tokens (None: no limit); None without a plan."""
        pending: PendingSplice | None = req.pic.pending
        if pending is None or num_computed is None:
            return None if pending is None else pending.plan.end
        with self._stations.recovery.guarded(Fallback.FAULT_PLAN, [req]):
            limits = {"most": self.rem_extend, "page_size": page_size, "whole": req.pic.whole}
            end = pending.plan.cut(num_computed, **limits)
            # Neither of their passes may have more tokens than SGLang has memory for.
            if pending.plan.conditional and (end < pending.plan.end or pending.plan.num_charged > num_computed):
                req.pic.drop_conditional()
                end = pending.plan.cut(num_computed, **limits)
            return end
        return None

    def _spliced_chunk_len(self, req: Req) -> int | None:
        """Tokens of the next chunk, runs included; None without a plan, which is dropped if slots are short."""
        pending: PendingSplice | None = req.pic.pending
        if pending is None or self.rem_chunk_tokens is None:
            return None
        limit = min(self.rem_chunk_tokens, self.chunked_req_limit or self.rem_chunk_tokens)
        end = self._cut(req, limit, page_size=self.page_size)
        if end is None:
            return None
        extend_len = end - pending.plan.prefix_len
        # NOTE: SGLang continues a chunked request whatever the budget, because its slots were counted at its first
        # chunk. The slots of a longer chunk, and those locked for donors, were not.
        if self.ceil_paged_tokens(extend_len) + self.page_size > self.cur_rem_tokens:
            req.pic.drop_plan(Fallback.MEMORY)
            return None
        return extend_len

    def _settle(self, req: Req, *, first_chunk: bool) -> None:
        """Clip the plan to the admitted chunk, return the budget charged for its runs, and count the chunk."""
        state: RequestState = req.pic
        stations, plan = self._stations, None
        with stations.recovery.guarded(Fallback.FAULT_PLAN, [req], is_admitted=True):
            plan = state.admit(req.prefix_len, req.extend_end, first_chunk=first_chunk)
        self.needs_whole_batch |= needs_whole_batch(req)
        left = len(req.full_untruncated_fill_ids) - req.extend_end
        if left > 0:
            # SGLang reserves no slots for the rest of a chunked request, because it admits nothing after it. Here
            # another request may follow that computes little and needs slots for all its tokens.
            self.memory_budget.reserve(left, 0)
        self.num_sequences += 1
        self.longest = max(self.longest, req.extend_end)
        self.reads_before += num_reads([(req.prefix_len, req.extend_end)] if plan is None else plan.gaps)
        if plan is not None:
            self.has_runs |= bool(plan.runs)
            if self.rem_extend is not None:
                self.rem_extend -= req.extend_end - req.prefix_len
            self.num_sequences += len(plan.gaps) - 1
            self.rem_input_tokens += plan.num_spared
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens += plan.num_spared
            self._log_hits(req)
        # After a fault the batch may be narrowed for other requests; this one is one whole gap.
        with stations.recovery.guarded(Fallback.FAULT_ACCOUNTING, [req], is_admitted=True):
            refusal = stations.eligibility.refusal(req)
            if first_chunk:
                state.prefix = stations.publication.prefix_of(req)
            # A refusal counts once, and a fault was counted when it happened.
            counted = refusal if first_chunk and not state.is_faulty else None
            stations.accounting.count_admitted(req, plan, counted, first_chunk=first_chunk, cost=self._planning.cost)
            # The audit computes token ids only: no embeddings, no earlier turns of a session.
            if refusal is None:
                for feature in stations.features:
                    feature.on_admitted(req)

    def _log_hits(self, req: Req) -> None:
        """Count the spliced tokens of an admitted chunk in SGLang's log and metrics as hits instead of input."""
        pending: PendingSplice = req.pic.pending
        num_spliced, num_fetched = pending.plan.num_spliced, pending.num_fetched
        self.log_hit_tokens += num_spliced
        self.log_input_tokens -= num_spliced
        # As SGLang: what a retracted request gets again is in the sums, and is taken out of rates of hits.
        if req.retracted_stain:
            self.reprocessed_log_hit_tokens += num_spliced
            self.reprocessed_log_input_tokens -= num_spliced
        else:
            self.log_device_hit_tokens += num_spliced - num_fetched
            self.log_host_hit_tokens += num_fetched

    def _has_admitted(self, req: Req) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    @property
    def _free_sequences(self) -> int:
        """How many more virtual sequences the attention backends' tables can take."""
        return self._planning.limits.max_sequences - self.num_sequences

    def _room_for(self, req: Req) -> int:
        """How many virtual sequences of a request the batch can take, with at most `max_keys` keys."""
        longest = max(1, self.longest, len(req.full_untruncated_fill_ids))
        return min(self._free_sequences, self._planning.limits.max_keys // longest - self.num_sequences)

    @contextmanager
    def _budgets(self, *, chunk: int, spliced: int, request_limit: int | None = None) -> Iterator[None]:
        """Replace SGLang's limits during a selection; what it charges meanwhile stays charged."""
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
