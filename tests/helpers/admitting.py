"""SGLang's `PrefillAdder` over a cache without rows, and admissions that it is asked for."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_policy import PrefillAdder, _PrefillAdmission
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_pic.adapter.serve.admission import PicPrefillAdder
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.planning import Limits
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import Exactness, Plan
from tests.helpers import builders

PAGE = 16

LOGGED = ("log_hit_tokens", "log_input_tokens", "log_device_hit_tokens", "log_host_hit_tokens")
LOGGED += ("reprocessed_log_hit_tokens", "reprocessed_log_input_tokens")
"""What SGLang counts of a round."""

# Which fields there are depends on the version of SGLang.
_NO_ADMISSION = {field.name: 0 for field in dataclasses.fields(_PrefillAdmission)}


def plan(end: int, *runs: tuple[int, int]) -> Plan:
    """A plan up to `end` with runs `(target_start, target_end)`."""
    return builders.plan(0, end, *((start, stop, start) for start, stop in runs))


class Cache:
    """Stands for the cache and what admission is given: plans each request as the request says."""

    def __init__(self, max_sequences: int = 64, max_keys: int = 1 << 24, max_extend: int | None = None) -> None:
        self.planning = self.stations = self.eligibility = self.accounting = self.publication = self.recovery = self
        self.feature = Feature()
        self.features = Features([self.feature])
        self.refused: Fallback | None = None
        self.cost = None
        self.limits, self.next_batch_is_whole = Limits(max_sequences, max_keys, max_extend), False
        self.num_locked = self.num_locked_elsewhere = 0
        self.asked: list[tuple[int, int, int]] = []
        """Per plan, where it begins, how many gaps it may have, and how much the batch computes already."""
        self.counted: list[tuple[int, Fallback | None]] = []
        """Per admitted chunk, its spliced tokens and why its plan was lost."""

    def plan(
        self, req: Any, tree: Cache, *, prefix_len: int, max_gaps: int, num_before: int, reads_before: int
    ) -> None:
        assert tree is self
        self.asked.append((prefix_len, max_gaps, num_before))
        self.reads_before = reads_before
        req.pic.drop_plan()
        req.pic.last_plan.lost = None
        if req.plan is not None:
            locks = ExitStack()
            locks.callback(self.unlock)
            self.num_locked += 1
            runs = tuple(run for run in req.plan.runs if run.target_start >= prefix_len)
            made = msgspec.structs.replace(req.plan, prefix_len=prefix_len, runs=runs)
            req.pic.pending = PendingSplice.on_device(made, [torch.arange(run.num_tokens) for run in made.runs])
            req.pic.pending.locks = locks

    def make_room(self) -> bool:
        self.num_locked_elsewhere -= (has_some := self.num_locked_elsewhere > 0)
        return has_some

    def guarded(self, *_: object, **__: object) -> nullcontext[None]:
        return nullcontext()

    def unlock(self) -> None:
        self.num_locked -= 1

    def refusal(self, _: Any) -> Fallback | None:
        return self.refused

    def prefix_of(self, req: Any) -> Exactness:
        return Exactness(exact_len=req.prefix_len)

    def count_admitted(self, req: Any, plan: Plan | None, _: object, *, first_chunk: bool, cost: None) -> None:
        self.counted.append((plan.num_spliced if plan else 0, req.pic.last_plan.lost))


def adder(budget: int | None, cache: Any, shared: Any = None, *, running: tuple[Any, ...] = ()) -> Any:
    """As SGLang makes one for a round; `running` requests decode in the same batch."""
    made = PicPrefillAdder.__new__(PicPrefillAdder)
    stock = PrefillAdder.__init__
    try:
        PrefillAdder.__init__ = lambda self, *_, **__: setattr(self, "running_batch", SimpleNamespace(reqs=running))
        made.tree_cache = cache
        made.__init__(shared or cache, PAGE, cache, None, None, 0.5, 100, budget, len(running))  # type: ignore[misc]
    finally:
        PrefillAdder.__init__ = stock
    made.page_size = PAGE
    made.rem_chunk_tokens, made.rem_input_tokens, made.chunked_req_limit = budget, 1 << 20, None
    made.new_chunked_req, made.can_run_list = None, []
    vars(made).update(dict.fromkeys(LOGGED, 0))
    made.memory_budget = PrefillBudget(SimpleNamespace(page_size=PAGE), cache)
    return made


def stock_adder(budget: int | None, cache: Any, memory_budget: Any) -> Any:
    """One that admits by SGLang's own code, into these memory budgets."""
    made = adder(budget, cache)
    nothing = ("prefill_max_requests", "prefill_delayer_single_pass", "kv_shard_scratch_spec", "dllm_config")
    vars(made).update(dict.fromkeys((*nothing, "rem_mamba_slots")))
    vars(made).update(
        memory_budget=memory_budget,
        token_to_kv_pool_allocator=SimpleNamespace(request_slot_reserve=lambda **_: 0),
        running_batch=SimpleNamespace(reqs=[]),
        per_req_token_overhead=PAGE,
        log_replay_tokens=0,
        exact_chunk_fill=False,
        is_hybrid_swa=True,
        _mamba_slot_cost=0,
        _replay_len=lambda *_: 0,
        _account_prefill_cache_admission=lambda *_: None,
    )
    vars(cache).update(disable=False, buffer_pipeline=None, linker=None, load_back_is_cache_owned=lambda: True)
    # Donors are unlocked without a node.
    vars(cache).update(lock=lambda node: None, unlock=lambda *nodes: nodes or Cache.unlock(cache))
    return made


def stock_request(made: Plan, **fields: Any) -> Any:
    """A request with such a plan as far as `stock_adder` reads it."""
    none = ("swa_host_hit_length", "mamba_host_hit_length", "auxiliary_swa_host_hit_length")
    kv = SimpleNamespace(holds_mamba=True, req_pool_idx=None, cache_protected_len=0)
    plain = {**dict.fromkeys(none, 0), "last_node": "root", "best_match_node": "root", "kv": kv, "lock": None}
    plain |= {"needs_host_load_back": lambda: False}
    req = builders.request(range(made.end), plan=made, end=made.end, **plain | fields)
    req.sampling_params.max_new_tokens, req.sampling_params.ignore_eos = 4, False
    return req


def admit(extend_len: int, *, is_chunked: bool = False) -> _PrefillAdmission:
    """SGLang's decision to admit so many tokens behind no prefix."""
    decided = {"extend_len": extend_len, "max_new_tokens": 1, "is_chunked": is_chunked}
    return _PrefillAdmission(**_NO_ADMISSION | decided)


def select(made: Any, req: Any, *, has_chunked_req: bool = False, align: int | None = None) -> Any:
    made._plan(req)
    options = {"has_chunked_req": has_chunked_req, "truncation_align_size": align, "host_hit_length": 0}
    return made._select_prefill_admission(req, **options)
