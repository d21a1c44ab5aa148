"""Admission: one unfinished request a round, no more virtual sequences than the tables have room for, and what is
counted happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission
from sglang.srt.mem_cache.prefill_budget import PrefillBudget, SWAPrefillBudget

from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.gap_batch import build_gap_batch
from sglang_pic.adapter.serve.rows import Place
from sglang_pic.core import Plan
from tests.helpers import builders
from tests.helpers.admitting import LOGGED, PAGE, Cache, adder, admit, plan, select, stock_adder, stock_request


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """SGLang's own selection, which admits what fits into the chunk; the requests that reach it."""
    reached: list[Any] = []

    def select(self: Any, req: Any, **_: object) -> Any:
        reached.append(req)
        if req.no_token:
            req.no_token -= 1
            return AddReqResult.NO_TOKEN
        extend_len = min(req.end, self.rem_chunk_tokens or req.end)
        return admit(extend_len, is_chunked=extend_len < req.end)

    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", select)
    return reached


@pytest.fixture
def admitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's adder, admitting whole whatever it is asked to, and charging it."""

    def commit(self: Any, req: Any, admission: _PrefillAdmission, _: int) -> None:
        req.extend_end = admission.prefix_len + admission.extend_len
        self.can_run_list.append(req)
        self.rem_input_tokens -= admission.extend_len
        self.log_input_tokens += admission.extend_len

    def add(self: Any, req: Any, *_: object) -> AddReqResult:
        self._commit_prefill_admission(req, admit(req.end), 0)
        return AddReqResult.CONTINUE

    monkeypatch.setattr(PrefillAdder, "_commit_prefill_admission", commit)
    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", lambda self, req: commit(self, req, admit(req.end), 0))
    monkeypatch.setattr(PrefillAdder, "cur_rem_tokens", 1 << 20, raising=False)


def request(plan: Plan | None, end: int = 0, no_token: int = 0, **fields: Any) -> Any:
    """SGLang's request as far as admission reads it; it goes by place where `fields` say so."""
    end = plan.end if plan else end
    ids = range(end)
    return builders.request(ids, full_untruncated_fill_ids=ids, plan=plan, end=end, no_token=no_token, **fields)


LONG = (4000, (64, 1200), (1300, 2000))
"""Its chunk of 512 computed tokens ends at a page's edge behind two runs and leaves some of the budget."""


def test_only_one_request_of_a_round_is_left_unfinished(stock: list[Any]) -> None:
    made = adder(512, Cache())
    assert select(made, request(plan(*LONG))).extend_len == 2336
    for changes, options in (
        ({"rem_chunk_tokens": PAGE - 5}, {}),
        ({"new_chunked_req": "another"}, {}),
        ({}, {"has_chunked_req": True}),
        ({"rem_chunk_tokens": 63}, {"align": 64}),
    ):
        made = adder(512, Cache())
        for name, value in changes.items():
            setattr(made, name, value)
        assert select(made, request(plan(*LONG)), **options) is AddReqResult.OTHER
    assert len(stock) == 1
    made = adder(PAGE - 5, Cache())
    made.new_chunked_req = "another"
    assert select(made, request(plan(600, (0, 592)))).extend_len == 600, "it fits whole"


@pytest.mark.parametrize("first", ["new", "continued"])
def test_beside_an_unfinished_request_sglang_cuts_no_second_one(stock: list[Any], first: str) -> None:
    """The first one would be answered as if its prompt ended there.

    The second one has no plan, or gives its donors back for memory.
    """
    for second in (request(None, end=600), request(plan(600, (0, 592)), no_token=1)):
        made, is_continued = adder(512, Cache()), first == "continued"
        made.new_chunked_req = None if is_continued else "another"
        assert select(made, second, has_chunked_req=is_continued) is AddReqResult.OTHER
        assert select(made, request(None, end=500), has_chunked_req=is_continued).extend_len == 500, "it fits whole"
    assert select(adder(512, Cache()), request(None, end=600)).extend_len == 512, "it is the first one"


def test_the_rest_of_a_request_that_was_cut_has_slots_whoever_comes_behind_it(admitting: None) -> None:
    """Of a prompt that is spliced little is computed, but its rows take as many slots as any other's."""
    made = adder(512, Cache())
    for end, cut_at in ((4000, 512), (600, 600)):
        req = request(plan(end), end=end)
        req.extend_end = cut_at
        made._settle(req, first_chunk=True)
    assert made.memory_budget.current_offset == 4000 - 512 + PAGE


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_plan_begins_behind_what_is_loaded_back(is_loaded: bool, stock: list[Any]) -> None:
    """SGLang loads what the exact match has on the host before it admits; now and then that fails."""
    cache = Cache()
    made, req = adder(None, cache), request(plan(*LONG), host_hit_length=48)
    made._plan(req, num_to_load=48)
    options = {"has_chunked_req": False, "truncation_align_size": None}
    for host_hit_length in (48, 48 if is_loaded else 0):
        made._select_prefill_admission(req, host_hit_length=host_hit_length, **options)
    assert [begin for begin, *_ in cache.asked] == ([48] if is_loaded else [48, 0])
    assert (len(stock), cache.num_locked) == (2, 1)


def test_a_prompt_that_is_not_loaded_back_is_spliced_though_nothing_was_left_behind_it(stock: list[Any]) -> None:
    cache, whole = Cache(), plan(*LONG)
    made, req = adder(None, cache), request(None, host_hit_length=whole.end)
    made._plan(req, num_to_load=whole.end)
    req.plan = whole
    for host_hit_length in (whole.end, 0):
        made._select_prefill_admission(
            req, has_chunked_req=False, truncation_align_size=None, host_hit_length=host_hit_length
        )
    assert cache.num_locked == 1
    assert req.pic.pending.plan.runs == whole.runs


def test_a_load_that_brings_more_than_it_promised_has_a_plan_behind_all_of_it() -> None:
    """Rows that are on the device and lack their windows alone: runs before their end would be written over them."""
    cache = Cache()
    memory = SimpleNamespace(check_prefill=lambda **of: (True, of["chunk_limit"]), reserve=lambda *_, **__: None)
    memory.has_capacity, memory.prepare_load_back = lambda: True, lambda **_: True
    memory.load_back_needs_full_tokens = False
    made = stock_adder(None, cache, memory)
    cache.init_load_back = lambda _: (192, "loaded")
    req = stock_request(plan(600, (64, 150), (300, 500)), swa_host_hit_length=49, needs_host_load_back=lambda: True)
    assert made.add_one_req(req, False, None) is AddReqResult.CONTINUE
    splice = req.pic.take_plan()
    assert (req.prefix_len, req.extend_end, cache.num_locked) == (192, 600, 1)
    assert [(run.target_start, run.target_end) for run in splice.plan.runs] == [(300, 500)]
    assert cache.counted == [(200, None)]
    # A plan of other tokens would be refused by the pass.
    build_gap_batch([splice], [192], [408], [408], [torch.arange(600)], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"a plan of tokens \[192, 600\) for a request's \[0, 600\)"):
        build_gap_batch([splice], [0], [600], [600], [torch.arange(600)], torch.device("cpu"))


def test_window_slots_of_spliced_tokens_are_reserved() -> None:
    """They are allocated like all others, whatever the budget for computed tokens is."""
    slots, cache = 24_000, Cache()
    for name in ("full_evictable_size", "swa_evictable_size"):
        setattr(cache, name, lambda: 0)
    cache.sliding_window_size, cache.supports_swa, cache.supports_mamba = 1024, lambda: True, lambda: False
    sizes = {"full_available_size": lambda: 1 << 20, "swa_available_size": lambda: slots, "size_swa": slots}
    made = stock_adder(2048, cache, SWAPrefillBudget(SimpleNamespace(page_size=PAGE, **sizes), cache))
    for _ in range(3):
        made.add_one_req(stock_request(plan(20_000, (64, 19_700))), False, None)
    assert 20_000 <= sum(req.extend_end for req in made.can_run_list) <= slots


@pytest.mark.parametrize("is_retracted", [False, True], ids=["new", "retracted"])
def test_sglang_counts_spliced_tokens_as_hits(is_retracted: bool) -> None:
    """Of the device and of the host; its rates of hits leave out what retracted requests get again."""
    allocator = SimpleNamespace(page_size=PAGE, available_size=lambda: 8_000)
    made = stock_adder(512, cache := Cache(), PrefillBudget(allocator, cache))
    req = stock_request(plan(400, (64, 164), (200, 300)), retracted_stain=is_retracted)
    on_device = cache.plan

    def plan_with_host(*args: Any, **options: Any) -> None:
        on_device(*args, **options)
        pieces = req.pic.pending.pieces
        pieces[1] = pieces[1]._replace(place=Place.HOST)

    vars(cache).update(supports_mamba=lambda: False, evictable_size=lambda: 0, plan=plan_with_host)
    assert made.add_one_req(req, has_chunked_req=False, truncation_align_size=None) is AddReqResult.CONTINUE
    hits = {"log_hit_tokens": 200, "log_input_tokens": 200}
    if is_retracted:
        hits |= {"reprocessed_log_hit_tokens": 200, "reprocessed_log_input_tokens": 200}
    else:
        hits |= {"log_device_hit_tokens": 100, "log_host_hit_tokens": 100}
    assert {name: vars(made)[name] for name in LOGGED} == {**dict.fromkeys(LOGGED, 0), **hits}


def test_donors_that_fill_the_pool_are_given_back_so_that_the_request_fits(stock: list[Any]) -> None:
    cache = Cache()
    for no_token, admitted in ((2, False), (1, True)):
        req = request(plan(*LONG), no_token=no_token)
        admission = select(adder(None, cache), req)
        assert (admission is AddReqResult.NO_TOKEN) != admitted
        assert (req.pic.pending, req.pic.last_plan.lost, cache.num_locked) == (None, Fallback.MEMORY, 0)
    assert admission.extend_len == 4000


def test_a_batch_has_no_more_virtual_sequences_than_there_are_rows(admitting: None) -> None:
    """Requests that decode in it count, too."""
    cache = Cache(max_sequences=8)
    made = adder(None, cache, running=(request(None),) * 2)
    assert made.add_one_req(request(plan(400, (40, 100), (140, 300))), False, None) is AddReqResult.CONTINUE
    assert made.num_sequences == 2 + 3
    for _ in range(3):
        assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.CONTINUE
    assert cache.asked == [(0, 6, 0), (0, 3, 180), (0, 2, 580), (0, 1, 980)]
    assert cache.reads_before == sum([*range(40), *range(100, 140), *range(300, 400)]) + 2 * sum(range(400))
    assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.OTHER
    assert len(made.can_run_list) == 4


def test_a_gap_batch_has_a_bounded_number_of_keys(admitting: None) -> None:
    """Each sequence counts as long as the longest: many gaps of one long prompt, or of a short one beside it."""
    cache, spliced = Cache(max_keys=4000), plan(400, (40, 100), (140, 300))
    made = adder(None, cache)
    for _ in range(2):
        assert made.add_one_req(request(spliced), False, None) is AddReqResult.CONTINUE
    assert [most for _, most, _ in cache.asked] == [10, 7]
    assert made.add_one_req(request(None, end=600), False, None) is AddReqResult.OTHER, "7 rows of 600 are 4,200"
    assert made.num_sequences * made.longest == 2400
    # Beside a decoding request of 1,000 tokens there is room for 3 sequences; without runs SGLang decides.
    made = adder(None, cache, running=(request(None, end=1000),))
    assert made.add_one_req(request(plan(400, (40, 100))), False, None) is AddReqResult.CONTINUE
    assert cache.asked[-1][1] == 3
    made = adder(None, cache)
    assert made.add_one_req(request(None, end=0), False, None) is AddReqResult.CONTINUE, "SGLang judges such a prompt"
    assert cache.asked[-1][1] == 64
    for _ in range(12):
        assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.CONTINUE


def test_beside_a_draft_that_is_given_embeddings_a_batch_has_a_bounded_number_of_tokens(
    stock: list[Any], admitting: None
) -> None:
    """100,000 reused tokens of one prompt go through in passes of two chunks, spliced tokens included."""
    cache, most, long = Cache(max_extend=16_384), 16_384, request(plan(100_000, (100, 99_900)))
    made = adder(8_192, cache)
    admission = select(made, long)
    assert admission.extend_len == most
    made._commit_prefill_admission(long, admission, 0)
    made.new_chunked_req = long
    assert made.rem_chunk_tokens > 8_000, "little of it is computed"
    assert select(made, request(plan(1_000, (100, 900)))) is AddReqResult.OTHER, "the batch is full of spliced tokens"
    assert select(made, request(None, end=1_000)).extend_len == 1_000, "what is computed is bounded by the chunk"
    # The rest of the prompt is cut likewise, and so are two prompts together.
    made = adder(8_192, cache)
    made._plan(long)
    assert made._spliced_chunk_len(long) == most
    made, first = adder(8_192, cache), request(plan(16_000, (100, 15_900)))
    made._commit_prefill_admission(first, select(made, first), 0)
    assert (first.extend_end, select(made, request(plan(1_000, (100, 900)))).extend_len) == (16_000, 384)
    # Other servers are not bounded.
    assert select(adder(8_192, Cache()), request(plan(100_000, (100, 99_900)))).extend_len == 100_000


REORDERED = builders.conditional(plan(1000, (64, 264), (328, 828), (892, 980)), seam=64)
"""Its first pass computes 212 tokens, its second 584 at most."""


def test_no_pass_of_a_batch_has_more_tokens_than_its_chunk(stock: list[Any], admitting: None) -> None:
    """One document alone may have more tokens than a pass has memory for."""
    made, req = adder(700, Cache()), request(REORDERED)
    admission = select(made, req)
    made.rem_chunk_tokens -= admission.extend_len
    made._commit_prefill_admission(req, admission, 0)
    assert (req.extend_end, made.rem_chunk_tokens, len(req.pic.pending.plan.runs)) == (1000, 700 - 584, 3)
    for budget in (583, 211):
        req = request(REORDERED)
        assert select(adder(budget, Cache()), req).extend_len == budget - budget % PAGE
        assert not req.pic.pending.plan.runs, "they are computed, in chunks"
    assert select(adder(None, Cache()), request(REORDERED)).extend_len == 1000, "chunks have no limit"
    made, req = adder(583, Cache()), request(REORDERED)
    made._plan(req)
    assert made._spliced_chunk_len(req) == 583 - 583 % PAGE


def test_reordered_documents_wait_for_a_batch_with_room_for_them(stock: list[Any], admitting: None) -> None:
    """A prompt whose turn comes when most of a chunk is taken would be cut, and its documents be computed."""
    cache = Cache()
    made = adder(700, cache)
    made.can_run_list, made.rem_chunk_tokens = ["another"], 500
    req = request(REORDERED)
    assert select(made, req) is AddReqResult.OTHER
    assert select(made, request(plan(*LONG))).extend_len > 500, "others are cut"
    assert select(adder(700, cache), req).extend_len == 1000
    assert select(made, req).extend_len == 500 - 500 % PAGE, "it waits once"
    # One that fits no batch does not wait, nor one that fits this one.
    made = adder(583, cache)
    made.can_run_list = ["another"]
    assert select(made, request(REORDERED)).extend_len == 583 - 583 % PAGE
    made = adder(700, cache)
    made.can_run_list, made.rem_chunk_tokens = ["another"], 600
    assert select(made, request(REORDERED)).extend_len == 1000


BY_PLACE = (
    {"input_embeds": [[0.0]]},
    {"positional_embed_overrides": "some"},
    {"return_hidden_states": True},
    {"return_hidden_states": "last"},
)


@pytest.mark.parametrize("fields", BY_PLACE, ids="-".join)
@pytest.mark.parametrize("first", ["new", "unfinished", "decoding"])
def test_behind_a_request_that_goes_by_place_nothing_is_spliced(
    admitting: None, fields: dict[str, Any], first: str
) -> None:
    """Such a batch is computed whole: no token of it is counted as a hit or left out of the budget."""
    cache, placed = Cache(), request(None, end=100, **fields)
    made = adder(None, cache, running=(placed,) if first == "decoding" else ())
    if first == "new":
        made.add_one_req(placed, False, None)
    elif first == "unfinished":
        made.add_chunked_req(placed)
    before = made.rem_input_tokens
    spliced = request(plan(400, (40, 100), (140, 300)))
    assert made.add_one_req(spliced, False, None) is AddReqResult.CONTINUE
    assert cache.counted[-1] == (0, Fallback.BATCH)
    assert before - made.rem_input_tokens == 400
    assert (spliced.pic.pending, spliced.pic.spliced, cache.num_locked) == (None, [], 0)


@pytest.mark.parametrize("fields", BY_PLACE, ids="-".join)
@pytest.mark.parametrize("first", ["new", "unfinished"])
def test_a_request_that_goes_by_place_waits_for_a_batch_without_splices(
    admitting: None, fields: dict[str, Any], first: str
) -> None:
    cache, spliced = Cache(), request(plan(400, (40, 100), (140, 300)))
    made = adder(None, cache)
    if first == "new":
        made.add_one_req(spliced, False, None)
    else:
        made.add_chunked_req(spliced)
    placed = request(None, end=100, **fields)
    assert made.add_one_req(placed, False, None) is AddReqResult.OTHER
    assert made.can_run_list == [spliced]
    assert cache.counted == [(220, None)]
    # It waits for one batch, even where the scheduler prefers others to it; the one after next has splices again.
    made, other = adder(None, cache), request(plan(400, (40, 100)))
    assert made.add_one_req(other, False, None) is AddReqResult.CONTINUE
    assert made.add_one_req(placed, False, None) is AddReqResult.CONTINUE
    assert cache.counted[1:] == [(0, Fallback.BATCH), (0, None)]
    adder(None, cache).add_one_req(request(plan(400, (40, 100))), False, None)
    assert cache.counted[-1] == (60, None)


def test_what_is_not_admitted_gives_its_donors_back(admitting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    monkeypatch.setattr(PrefillAdder, "add_one_req", lambda *_: AddReqResult.NO_TOKEN)
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", lambda _, req: req)
    for add in ("add_one_req", "add_chunked_req"):
        made, req = adder(None, cache), request(plan(400, (40, 100)))
        getattr(made, add)(req, *(() if add == "add_chunked_req" else (False, None)))
        assert (req.pic.pending, cache.num_locked, cache.counted) == (None, 0, [])


@pytest.fixture
def without_room(admitting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's adder beside sliding windows: an unfinished request waits while rows are locked."""
    add = PrefillAdder.add_chunked_req

    def add_if_there_is_room(self: Any, req: Any) -> Any:
        return req if self.tree_cache.num_locked or self.tree_cache.num_locked_elsewhere else add(self, req)

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add_if_there_is_room)


def test_an_unfinished_request_goes_on_without_the_donors_that_fill_the_pool(without_room: None) -> None:
    cache = Cache()
    made, req = adder(512, cache), request(plan(400, (40, 100)))
    assert made.add_chunked_req(req) is None
    assert (made.can_run_list, cache.counted, cache.num_locked) == ([req], [(0, Fallback.MEMORY)], 0)
    assert made.add_one_req(request(None, end=400), False, None) is AddReqResult.CONTINUE


def test_beside_an_unfinished_request_that_waits_nobody_is_admitted(without_room: None) -> None:
    """SGLang counts a chunk of it in flight in every batch: it would lose the first token of its answer."""
    cache = Cache()
    cache.num_locked_elsewhere = 1
    made, req = adder(512, cache, running=(request(None),)), request(plan(400, (40, 100)))
    assert made.add_chunked_req(req) is req
    assert made.add_one_req(request(None, end=40), True, None) is AddReqResult.OTHER
    assert (made.can_run_list, cache.counted, cache.num_locked) == ([], [], 0)
