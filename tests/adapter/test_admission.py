"""Admission: one unfinished request a round, no more virtual sequences than the tables have room for."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # SGLang and what it imports warn about this machine's missing accelerators.
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.managers.schedule_policy")
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission

    from sglang_pic.adapter.serve.admission import PicPrefillAdder

from sglang_pic.adapter.serve.accounting import Fallback
from sglang_pic.adapter.serve.state import PendingSplice
from sglang_pic.core import Path, Plan, Run, as_tokens

DONOR = Path("donor", [as_tokens(range(4000))])
PAGE = 16


def pending(end: int, *runs: tuple[int, int], prefix_len: int = 0) -> PendingSplice:
    """A plan up to `end` with runs `(target_start, target_end)`."""
    taken = tuple(Run(target_start=a, target_end=b, donor_start=0, donor=DONOR, seam_len=0) for a, b in runs)
    return PendingSplice(Plan(prefix_len=prefix_len, end=end, runs=taken), [], locks=["lock"])


class Cache:
    """Stands for the cache: hands out the plan that a request carries."""

    def __init__(self, max_sequences: int = 64) -> None:
        self.max_sequences = max_sequences
        self.allowed: list[int] = []
        self.fallbacks: list[Fallback] = []
        self.metrics = SimpleNamespace(count_fallback=self.fallbacks.append)

    def plan_request(self, req: Any, *, max_gaps: int) -> None:
        self.allowed.append(max_gaps)

    def pending_of(self, req: Any) -> PendingSplice | None:
        plan: PendingSplice | None = req.plan
        return plan

    def drop_pending(self, req: Any) -> None:
        req.plan = None

    def admit(self, req: Any, **_: object) -> None:
        pass


def adder(budget: int | None, cache: Cache) -> Any:
    made = PicPrefillAdder.__new__(PicPrefillAdder)
    made.tree_cache, made.page_size = cache, PAGE
    made.rem_chunk_tokens, made.rem_input_tokens, made.chunked_req_limit = budget, 1 << 20, None
    made.new_chunked_req, made.can_run_list = None, []
    made.num_sequences = made.log_hit_tokens = made.log_input_tokens = 0
    return made


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """SGLang's own selection, which admits what fits into the chunk; the requests that reach it."""
    reached: list[Any] = []

    def select(self: Any, req: Any, **_: object) -> Any:
        reached.append(req)
        if req.no_token:
            req.no_token -= 1
            return AddReqResult.NO_TOKEN
        return _PrefillAdmission(0, min(req.end, self.rem_chunk_tokens or req.end), 1, False, 0)

    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", select)
    return reached


def request(plan: PendingSplice | None, end: int = 0, no_token: int = 0) -> Any:
    return SimpleNamespace(plan=plan, end=plan.plan.end if plan else end, extend_end=end, no_token=no_token)


def select(made: Any, req: Any, *, has_chunked_req: bool = False, align: int | None = None) -> Any:
    return made._select_prefill_admission(req, has_chunked_req=has_chunked_req, truncation_align_size=align)


LONG = (4000, (64, 1200), (1300, 2000))
"""Its chunk of 512 computed tokens ends at a page's edge behind two runs and leaves some of the budget."""


def test_only_one_request_of_a_round_is_left_unfinished(stock: list[Any]) -> None:
    made = adder(512, Cache())
    assert select(made, request(pending(*LONG))).extend_len == 2336
    for changes, options in (
        ({"rem_chunk_tokens": PAGE - 5}, {}),
        ({"new_chunked_req": "another"}, {}),
        ({}, {"has_chunked_req": True}),
        ({"rem_chunk_tokens": 63}, {"align": 64}),
    ):
        made = adder(512, Cache())
        for name, value in changes.items():
            setattr(made, name, value)
        assert select(made, request(pending(*LONG)), **options) is AddReqResult.OTHER
    assert len(stock) == 1


def test_a_request_that_fits_goes_beside_an_unfinished_one(stock: list[Any]) -> None:
    made = adder(PAGE - 5, Cache())
    made.new_chunked_req = "another"
    assert select(made, request(pending(600, (0, 592)))).extend_len == 600


def test_donors_that_fill_the_pool_are_counted_once_the_request_is_admitted(stock: list[Any]) -> None:
    cache = Cache()
    assert select(adder(None, cache), request(pending(*LONG), no_token=2)) is AddReqResult.NO_TOKEN
    assert cache.fallbacks == []
    assert select(adder(None, cache), request(pending(*LONG), no_token=1)).extend_len == 4000
    assert cache.fallbacks == [Fallback.MEMORY]


def test_a_batch_has_no_more_virtual_sequences_than_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(max_sequences=6)
    made = adder(None, cache)

    def add(self: Any, req: Any, *_: object) -> AddReqResult:
        self.can_run_list.append(req)
        self._settle(req, req.plan, first_chunk=True)
        return AddReqResult.CONTINUE

    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    spliced = request(pending(400, (40, 100), (140, 300)), end=400)
    assert made.add_one_req(spliced, False, None) is AddReqResult.CONTINUE
    assert made.num_sequences == 3
    for _ in range(3):
        assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.CONTINUE
    assert cache.allowed == [6, 3, 2, 1]
    assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.OTHER
    assert len(made.can_run_list) == 4


def test_decodes_that_are_mixed_in_count_as_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillAdder, "__init__", lambda self, *_, **__: None)
    assert PicPrefillAdder(PAGE, None, None, None, 0.5, 100, 100, 7).num_sequences == 7
    assert PicPrefillAdder(PAGE, None, None, None, 0.5, 100, 100).num_sequences == 0
