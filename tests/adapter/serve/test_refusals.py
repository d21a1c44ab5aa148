"""Requests that are computed as usual, and counted by reason."""

from __future__ import annotations

import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pic.adapter import server_info
from sglang_pic.adapter.features.pins import Pins
from sglang_pic.adapter.metrics import Series
from sglang_pic.adapter.namespace import Namespace, is_strict
from sglang_pic.adapter.serve import receive as reception
from sglang_pic.adapter.serve.account import FALLBACKS, SPLICED_TOKENS, TOKENS, Accounting
from sglang_pic.adapter.serve.admission import Admission
from sglang_pic.adapter.serve.fallback import REASONS, Fallback
from sglang_pic.adapter.serve.feature import Feature, Features
from sglang_pic.adapter.serve.modes import MODE_OFF, SWITCH_KEY, Cause, Eligibility, Modes
from sglang_pic.adapter.serve.options import Mode, RequestOptions, Skills
from sglang_pic.adapter.serve.receive import _details, receive
from sglang_pic.adapter.serve.rows import TreeRows
from sglang_pic.adapter.serve.state import LastPlan, RequestState
from sglang_pic.adapter.serve.tree import UnifiedRadixCache
from sglang_pic.adapter.support import max_keys, refused_backend
from sglang_pic.config import PicConfig
from sglang_pic.core import (
    ContentIndex,
    Context,
    DropReason,
    Exactness,
    Plan,
    PlanOptions,
    ReusePolicy,
    RowNames,
    Run,
    as_tokens,
)
from tests.helpers.builders import (
    DONOR,
    Kept,
    Server,
    hooks_of,
    make_allocator,
    make_planning,
    make_stations,
    make_tree,
    request,
    splice,
)


class Index:
    """Stands where the chunk index does: keeps what it was asked with, and finds nothing."""

    names = RowNames()
    asked: PlanOptions | None = None
    has_pins = False

    def plan(self, _: object, tokens: Any, *, prefix_len: int, options: PlanOptions, rows: TreeRows) -> Plan:
        self.asked, self.has_pins = options, rows._pinned_len is not None
        return Plan(prefix_len=prefix_len, end=len(tokens))


@pytest.fixture
def eligibility() -> Eligibility:
    return make_stations().eligibility


def planned(req: Any) -> Index:
    """An index that was asked for a request's plan, if one was made."""
    index, tree = Index(), SimpleNamespace(page_size=1)
    stations = make_stations()
    stations.index = index
    make_planning(stations).plan(req, tree, max_gaps=64)  # type: ignore[arg-type]
    return index


def asked_for(req: Any) -> PlanOptions | None:
    """The options of the request's plan, if one was made."""
    return planned(req).asked


@pytest.mark.feature(
    "hidden states", "streaming sessions", "logprobs of the whole prompt", "scoring in the middle of a prompt"
)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"multi_item_delimiter_indices": [10, 20]}, Fallback.SCORING),
        ({"token_indices_to_pool": [10, 20]}, Fallback.SCORING),
        ({"input_embeds": [[0.0]]}, Fallback.EMBEDDINGS),
        ({"positional_embed_overrides": "some"}, Fallback.EMBEDDINGS),
        ({"multimodal_inputs": "an image"}, Fallback.MEDIA),
        ({"return_hidden_states": True}, Fallback.HIDDEN_STATES),
        ({"session": SimpleNamespace(streaming=True)}, Fallback.SESSION),
        ({"return_logprob": True, "logprob_start_len": 0}, Fallback.INPUT_LOGPROBS),
        ({"pic": RequestState(RequestOptions(), namespace=Namespace("k" * 1025))}, Fallback.KEY),
        ({"pic": RequestState(RequestOptions(), namespace=Namespace("k" * 1024, "s" * 1025))}, Fallback.KEY),
    ],
)
def test_what_splices_would_not_serve_is_computed(
    eligibility: Eligibility, fields: dict[str, Any], reason: Fallback
) -> None:
    req, series = request(**fields), Kept()
    assert asked_for(req) is None
    Accounting(series).count_admitted(req, None, eligibility.refusal(req), first_chunk=True)
    assert series.by_label(FALLBACKS) == {reason.value: 1}
    details = _details(None, None, req)
    assert details is not None
    assert (details["pic"], details["pic_reason"]) == (0, reason.value)


@pytest.mark.parametrize(
    ("dropped", "lost", "refusal", "num_spliced", "shown"),
    [
        ({DropReason.BELOW_MIN_RUN: 9, DropReason.TAIL: 1, DropReason.REORDERED: 2}, None, None, 0, "reordered"),
        ({DropReason.SINK: 1, DropReason.CHANGED_FIELD: 1}, None, None, 0, "changed_field"),
        ({DropReason.BELOW_MIN_RUN: 9}, None, None, 0, "below_min_run"),
        ({DropReason.TAIL: 3}, Fallback.MEMORY, None, 0, "memory"),
        ({DropReason.TAIL: 3}, None, Fallback.SWITCHED, 0, "switched"),
        # What was spliced needs no reason.
        ({DropReason.TAIL: 3}, None, None, 100, None),
        ({}, None, None, 0, None),
    ],
)
def test_the_response_has_the_reason_that_nothing_was_spliced(
    dropped: dict[DropReason, int], lost: Fallback | None, refusal: Fallback | None, num_spliced: int, shown: str | None
) -> None:
    """Of the whole request if there is one, else of most runs; short runs and those at the start come last."""
    req, series = request(), Kept()
    req.pic.last_plan = LastPlan(dropped, lost=lost)
    Accounting(series).count_admitted(req, None, refusal, first_chunk=True)
    req.pic.counts.chunk_hit = num_spliced
    details = _details(None, None, req) or {}
    assert details.get("pic_reason") == shown
    assert all(series.by_label(FALLBACKS)[each.value] for each in (*dropped, *filter(None, (lost, refusal))))


def test_an_ordinary_request_is_planned_and_one_that_opted_out_is_not() -> None:
    assert asked_for(request()) is not None
    assert asked_for(request(pic=RequestState(RequestOptions(mode=Mode.OFF)))) is None


@pytest.mark.parametrize(
    ("fields", "computed_from"),
    [
        ({}, None),
        ({"logprob_start_len": 0}, None),
        ({"return_logprob": True, "logprob_start_len": 200}, 200),
        # What SGLang makes of a request for logprobs of the answer. Retracted and prefilled again, the answer so far is
        # part of the extend, and its logprobs are taken once more.
        ({"return_logprob": True, "logprob_start_len": 250, "origin_input_ids": array("q", range(250))}, 250),
        # A short prompt whose answer is wanted with logprobs.
        ({"return_logprob": True, "logprob_start_len": 20, "origin_input_ids": array("q", range(20))}, 20),
    ],
)
def test_what_logprobs_are_wanted_of_is_computed(fields: dict[str, Any], computed_from: int | None) -> None:
    asked = asked_for(request(**fields))
    assert asked is not None
    assert asked.compute_from == computed_from


def test_what_a_request_sets_is_what_the_index_is_asked_for() -> None:
    """Pinned rows go near the end by the request's consent only."""
    pins = Features([Pins(ContentIndex(), make_stations().eligibility, 0, Series((), None))])
    options = {"seam_tokens": 3, "tail_tokens": 5, "skills": Skills.NEAR.value}
    near, far = (planned(received(pins, each)) for each in (options, {"skills": Skills.FAR.value}))
    asked = near.asked
    assert asked is not None
    assert asked.policy is not None
    assert (asked.policy.seam_tokens, asked.policy.tail_tokens) == (3, 5)
    assert (near.has_pins, far.has_pins) == (True, False)


def received(auditor: Any, pic: object = None, *, mode: Mode = Mode.AUTO, **fields: Any) -> Any:
    """A request as the scheduler gets it."""
    receive(req := request(asked=pic, **fields), auditor, ReusePolicy(), Modes(mode=mode))
    return req


def test_a_request_that_does_not_say_is_served_by_the_servers_mode(eligibility: Eligibility) -> None:
    auditor = Features()
    assert is_strict(received(auditor, mode=Mode.OFF).extra_key)
    assert eligibility.refusal(received(auditor, mode=Mode.OFF)) is Fallback.OFF
    opted_in = received(auditor, {"mode": "auto"}, mode=Mode.OFF)
    assert (opted_in.extra_key, eligibility.refusal(opted_in)) == (None, None)
    assert is_strict(received(auditor, {"mode": "off"}).extra_key)


def test_every_turn_of_a_streaming_session_is_kept_apart_from_spliced_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later turns go on with the row of the first, and any of them may ask for no splices."""
    auditor = Features()
    streaming, ordinary = (received(auditor, session=SimpleNamespace(streaming=s)) for s in (True, False))
    opted_out = received(auditor, {"mode": "off"})
    assert streaming.extra_key == opted_out.extra_key != ordinary.extra_key
    assert is_strict(streaming.extra_key)
    assert ordinary.extra_key == received(auditor).extra_key is None
    assert match(monkeypatch, stations_of(switched_off=True), streaming) == streaming.extra_key


def stations_of(*, switched_off: bool = False, serves: bool = True) -> Any:
    modes = Modes()
    if switched_off:
        modes.switch(Mode.OFF)
    feature = Feature()
    feature.diverts = lambda _: None if serves else Fallback.AUDIT  # type: ignore[method-assign]
    return make_stations(modes=modes, features=Features([feature]))


def match(patch: pytest.MonkeyPatch, stations: Any, req: Any) -> str | None:
    """The key under which SGLang's tree is asked for the prefix of a request that waits."""
    patch.setattr(UnifiedRadixCache, "match_prefix", lambda _, params: params.key.extra_key)
    cache = make_tree(make_allocator(64, 1), stations=stations)
    key = RadixKey(array("q", [1, 2]), req.extra_key, cache_salt=req.cache_salt)
    return cache.match_prefix(MatchPrefixParams(key=key, req=req))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("off", "reason"), [({"switched_off": True}, Fallback.SWITCHED), ({"serves": False}, Fallback.AUDIT)], ids=str
)
def test_what_waits_when_splicing_is_switched_off_is_kept_apart_from_spliced_rows(
    off: dict[str, bool], reason: Fallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither spliced nor served a prefix that may have been, and remains so when splicing is on again."""
    auditor = Features()
    for fields in ({}, {"extra_key": "k", "cache_salt": "s"}, {"extra_key": "kl", "lora_id": "l"}):
        req, apart = received(auditor, **fields), received(auditor, {"mode": "off"}, **fields)
        key = req.extra_key
        assert match(monkeypatch, stations_of(), req) == key, "nothing is off"
        assert stations_of(**off).eligibility.refusal(req) is reason, "in the middle of its prefill"
        assert match(monkeypatch, stations_of(**off), req) == req.extra_key == apart.extra_key != key
        assert match(monkeypatch, stations_of(), req) == apart.extra_key
        assert stations_of().eligibility.refusal(req) is reason


def test_an_operator_switches_a_running_server_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, series, auditor = hooks_of(monkeypatch, server_info), Kept(), Features()
    modes = Modes(series=series)
    modes.install()
    handler = hooks["after SchedulerInternalStateController._update_handlers"]({}, None)[SWITCH_KEY]
    made = make_stations(modes=modes).eligibility
    for value, is_on in ((0, False), (1, True), (0, False)):
        handler.validate(SWITCH_KEY, value)
        handler.apply(SWITCH_KEY, value)
        receive(req := request(), auditor, ReusePolicy(), modes)
        assert (modes.report().is_on, made.refusal(req) is None, is_strict(req.extra_key)) == (is_on, is_on, not is_on)
        assert series.level(MODE_OFF) == (not is_on)
    assert made.refusal(req) is Fallback.SWITCHED
    for value in (2, -1, 0.5):
        with pytest.raises(UpdateRejected, match="must be 0"):
            handler.validate(SWITCH_KEY, value)


@pytest.mark.parametrize(
    ("config", "asked", "fields", "cause"),
    [
        ({}, None, {}, None),
        ({}, Mode.OFF, {}, Cause.REQUEST),
        ({"mode": "off"}, None, {"extra_key": "k"}, Cause.MODE),
        ({"mode": "off"}, Mode.AUTO, {}, None),
        ({"mode": "off", "opt_in": ("k",)}, None, {"extra_key": "k"}, None),
        ({"mode": "off", "opt_in": ("s",)}, None, {"extra_key": "k", "cache_salt": "s"}, None),
        ({"mode": "off", "opt_in": ("k",)}, None, {"extra_key": "kl", "lora_id": "l"}, None),
        ({"opt_in": ("k",)}, Mode.OFF, {"extra_key": "k"}, Cause.REQUEST),
        ({"opt_out": ("k",), "opt_in": ("k",)}, Mode.AUTO, {"extra_key": "k"}, Cause.OPT_OUT),
        ({"opt_out": ("",)}, None, {"extra_key": ""}, None),
        ({"require_salt": True}, Mode.AUTO, {"extra_key": "k"}, Cause.REQUIRE_SALT),
        ({"require_salt": True}, None, {"cache_salt": "s"}, None),
        ({"share": 0}, None, {"session_id": "a"}, Cause.SHARE),
        ({"share": 0}, Mode.AUTO, {"session_id": "a"}, None),
        ({"share": 0, "opt_in": ("k",)}, None, {"extra_key": "k"}, None),
        ({"share": 0.999999}, None, {}, Cause.SHARE),
    ],
)
def test_a_servers_settings_decide_who_is_spliced(
    config: dict[str, Any], asked: Mode | None, fields: dict[str, Any], cause: Cause | None
) -> None:
    modes = Modes(PicConfig(**config))
    assert modes.decide(request(**fields), asked) is (Mode.AUTO if cause is None else Mode.OFF)
    assert [each for each, count in modes.report().num_off.items() if count] == ([] if cause is None else [cause.value])
    receive(
        req := request(asked=None if asked is None else {"mode": asked.value}, **fields),
        Features(),
        ReusePolicy(),
        modes,
    )
    assert is_strict(req.extra_key) == (cause is not None)


@pytest.mark.parametrize("name", ["session_id", "routing_key", "extra_key", "cache_salt"])
def test_a_share_of_the_sessions_is_spliced_and_each_stays_what_it_is(name: str) -> None:
    few, more = (Modes(PicConfig(share=share)) for share in (0.2, 0.5))
    sessions = [{name: f"session {i}"} for i in range(1000)]
    first, second, again = (
        [modes.decide(request(**session), None) is Mode.AUTO for session in sessions]
        for modes in (few, more, Modes(PicConfig(share=0.2)))
    )
    assert first == again
    assert 0 < sum(first) < sum(second) < len(sessions)
    assert all(later for was, later in zip(first, second, strict=True) if was), (
        "a larger share has the smaller one in it"
    )


_UPDATER = "SchedulerWeightUpdaterManager"


@pytest.mark.feature("new weights")
@pytest.mark.parametrize(
    "changed",
    [
        "Scheduler.record_weight_version_change",
        f"{_UPDATER}.end_weight_update",
        # If they fail SGLang records no version, but the target's weights may be new.
        f"{_UPDATER}.update_weights_from_disk",
        f"{_UPDATER}.update_weights_from_ipc",
        f"{_UPDATER}.update_weights_from_distributed",
        f"{_UPDATER}.update_weights_from_tensor",
    ],
)
def test_a_request_that_saw_other_weights_donates_nothing(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on its way when they changed: its rows are of both."""
    published: list[Any] = []

    def insert_rows(cache: Any, *_: object, **__: object) -> None:
        cache._inserted.append((SimpleNamespace(prefix_len=0, adopted_ranges=None), 300))

    monkeypatch.setattr(UnifiedRadixCache, "checkpoint_into_tree", insert_rows)
    publication = SimpleNamespace(flush=published.clear, publish=lambda req, *_, **__: published.append(req))
    stations = make_stations(publication=publication)
    cache: Any = make_tree(make_allocator(64, 1), stations=stations)
    hooks = hooks_of(monkeypatch, reception)
    reception.install(cache, Admission(make_planning(stations), stations), ReusePolicy())

    def new_request() -> Any:
        hooks["after Req.__init__"](None, req := request())
        return req

    before = new_request()
    cache.checkpoint_into_tree(before, up_to=200)
    assert published == [before]
    hooks[f"after {changed}"](None)
    assert published == [], "donors are forgotten, whether or not SGLang keeps their rows"
    cache.checkpoint_into_tree(before, up_to=300)
    assert published == []
    after = new_request()
    cache.checkpoint_into_tree(after, up_to=300)
    assert published == [after]


def test_rows_that_were_spliced_before_a_switch_are_known_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree keeps them as a prefix: who gets them inherits, and goes on with their generation. They make no donors,
    and neither do rows that were computed behind them while splicing was off.
    """
    server, ids = Server(), [*range(5000, 5040), *range(400)]
    rows = SimpleNamespace(prefix_len=0, adopted_ranges=None)
    monkeypatch.setattr(
        UnifiedRadixCache,
        "checkpoint_into_tree",
        lambda cache, _, *, up_to: cache._inserted.append((rows, up_to)),
    )
    cache: Any = make_tree(make_allocator(64, 1), stations=server.stations)
    server.serve([*range(400)])
    server.index.settle()
    num_donors = server.index.size.num_donors
    req = server.plan(ids)
    assert req.pic.admit(0, len(ids), first_chunk=True).num_spliced > 200
    server.stations.modes.switch(Mode.OFF)
    cache.checkpoint_into_tree(req, up_to=len(ids))
    server.stations.modes.switch(Mode.AUTO)
    assert server.index.exactness(Namespace(), as_tokens(ids)).approximate_len > 200
    assert server.index.size.num_donors == num_donors
    # Of one that spliced nothing nothing is known that others need.
    plain = server.receive([*range(9000, 9300)])
    plain.pic.admit(0, 300, first_chunk=True)
    server.stations.modes.switch(Mode.OFF)
    cache.checkpoint_into_tree(plain, up_to=300)
    assert server.index.exactness(Namespace(), as_tokens(plain.origin_input_ids)).unknown_len == 300


def test_options_that_the_front_end_did_not_see_are_served_exactly() -> None:
    req = received(Features(), {"seam": 1})
    assert (req.pic.options.mode, is_strict(req.extra_key)) == (Mode.OFF, True)


@pytest.mark.parametrize(
    ("sglang", "fields", "pic", "shown"),
    [
        # Where SGLang has a breakdown, it is of the exact prefix alone.
        ({"device": 30, "host": 0}, (90, 0, 0), (60, 40, 7, 20), {"device": 90}),
        ({"device": 10, "host": 15, "storage": 5}, (90, 15, 5), (60, 40, 7, 20), {"device": 70}),
        # A prompt of which nothing is reused shows that a field was why.
        (None, (0, 0, 0), (0, 0, 7, 0), {"device": 0, "host": 0}),
        (None, (0, 0, 0), (0, 0, 0, 0), None),
    ],
)
def test_where_cached_tokens_came_from_adds_up(
    sglang: Any, fields: tuple[int, ...], pic: tuple[int, ...], shown: dict[str, int] | None
) -> None:
    """Nothing inherited is not shown."""
    names = ("cached_tokens", "cached_tokens_host", "cached_tokens_storage")
    req = request(**dict(zip(names, fields, strict=True)))
    counts = req.pic.counts
    counts.chunk_hit, counts.behind_change, counts.guarded, counts.inherited = pic
    ours = dict(zip(("pic", "pic_behind_change", "pic_guarded", "pic_inherited"), pic, strict=True))
    if not pic[3]:
        del ours["pic_inherited"]
    assert _details(sglang, None, req) == (None if shown is None else {**(sglang or {}), **shown, **ours})


def test_every_prompt_token_has_one_source() -> None:
    req, series = request(prefix_len=20, extend_end=120), Kept()
    req.pic.prefix = Exactness(5, 3, 12)
    accounting = Accounting(series)
    accounting.count_admitted(req, Plan(prefix_len=20, end=120), None, first_chunk=True)
    req.prefix_len, req.extend_end = 120, 300
    accounting.count_admitted(req, None, None, first_chunk=False)
    assert series.counts == {
        ("sglang:pic_prompt_tokens_total", None): 300,
        ("sglang:pic_tokens_total", "prefix"): 20,
        ("sglang:pic_tokens_total", "chunk"): 0,
        ("sglang:pic_tokens_total", "computed"): 280,
        ("sglang:pic_guarded_tokens_total", None): 0,
        ("sglang:pic_inherited_tokens_total", None): 12,
        ("sglang:pic_unknown_tokens_total", None): 3,
    }


def test_every_prompt_token_of_a_request_that_was_retracted_between_chunks_is_counted_once() -> None:
    """It begins again with the chunk that it left in the tree, or with less, and is counted from where it was cut."""
    req, series = request(prefix_len=0, extend_end=100), Kept()
    accounting, state = Accounting(series), req.pic

    def admit(prefix_len: int, end: int, *runs: tuple[int, int, int]) -> None:
        req.prefix_len, req.extend_end = prefix_len, end
        state.pending = splice(prefix_len, end, *runs)
        is_first = state.matched_len is None
        planned = state.admit(prefix_len, end, first_chunk=is_first)
        accounting.count_admitted(req, planned, None, first_chunk=is_first)

    admit(0, 100, (40, 80, 0))
    counted = dict(series.counts)
    state.release_row()
    req.retracted_stain = True
    admit(20, 90, (40, 80, 0))
    assert series.counts == counted, "of this chunk every token was counted before"
    admit(90, 200, (95, 125, 0), (150, 180, 0))
    assert series.by_label(TOKENS) == {"chunk": 40 + 25 + 30, "computed": 60 + 45}
    assert sum(series.by_label(SPLICED_TOKENS).values()) == state.counts.chunk_hit == req.cached_tokens == 95
    state.release_row()
    admit(230, 300)
    assert series.by_label(TOKENS) == {"prefix": 30, "chunk": 95, "computed": 105 + 70}
    assert series.counts["sglang:pic_prompt_tokens_total", None] == 300
    state.release_row()
    counted = dict(series.counts)
    req.full_untruncated_fill_ids = range(340)
    admit(0, 340, (40, 280, 0))
    assert series.counts == counted, "a part of its answer is no prompt"


def run(start: int, end: int, context: Context) -> Run:
    """A run of a plan, at shift 0."""
    return Run(target_start=start, target_end=end, donor_start=start, donor=DONOR, seam_len=0, context=context)


def test_what_changed_fields_cost_is_counted_of_what_is_admitted_and_once() -> None:
    """A chunked prefill plans every chunk anew, and each plan tells of the fields before it and of what comes later."""
    req, series = request(), Kept()
    state: RequestState = req.pic
    runs = (run(20, 40, Context.SAME), run(50, 100, Context.CHANGED), run(110, 250, Context.CHANGED))
    plan = Plan(
        prefix_len=0,
        end=300,
        runs=runs,
        changed_fields=((44, 46), (105, 105)),
        guarded=((46, 50), (100, 110), (290, 300)),
    )
    for prefix_len, end in ((0, 105), (105, 300)):
        req.prefix_len, req.extend_end = prefix_len, end
        rest = tuple(each for each in plan.runs if each.target_start >= prefix_len)
        planned = replace(plan, prefix_len=prefix_len, runs=rest)
        state.last_plan = LastPlan({}, planned.guarded)
        Accounting(series).count_admitted(req, planned.clip(end), None, first_chunk=prefix_len == 0)
    counted = {name: count for name, count in series.counts.items() if "spliced_tokens" in name[0]}
    assert counted == {
        ("sglang:pic_spliced_tokens_total", "same"): 20,
        ("sglang:pic_spliced_tokens_total", "changed"): 50 + 140,
    }
    assert series.counts["sglang:pic_guarded_tokens_total", None] == 4 + 10 + 10 == state.counts.guarded
    assert (state.counts.chunk_hit, state.counts.behind_change) == (210, 190)
    req.retracted_stain = True
    Accounting(series).count_admitted(req, plan, None, first_chunk=True)
    assert (state.counts.guarded, state.counts.behind_change) == (24, 190), "a retracted request is not counted again"


@pytest.mark.parametrize("name", ["dsa", "nsa"])
def test_a_gap_batch_of_sparse_attention_gathers_little_beside_the_pool(name: str) -> None:
    """Index keys always, and where its kernel does not read the pool a layer's rows; `nsa` is an alias of `dsa`."""

    def keys(impl: str, *, is_fp8: bool, is_hybrid: bool = False) -> int:
        auto = impl == "flashmla_auto"
        # As the last pass left it.
        backend = SimpleNamespace(dsa_prefill_impl="flashmla_kv" if auto else impl)
        backend.enable_auto_select_prefill_impl = auto
        runner: Any = SimpleNamespace(
            prefill_attention_backend_str=name,
            req_to_token_pool=SimpleNamespace(size=48),
            attn_backend=SimpleNamespace(prefill_backend=backend) if is_hybrid else backend,
            token_to_kv_pool=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, dsa_kv_cache_store_fp8=is_fp8),
        )
        assert refused_backend(runner) == ""
        return max_keys(runner)

    in_pool = {keys(impl, is_fp8=is_fp8) for impl in ("trtllm", "flashmla_kv") for is_fp8 in (True, False)}
    assert in_pool == {keys("flashmla_sparse", is_fp8=False)} == {1 << 19}
    for impl in ("flashmla_sparse", "triton_sparse_mla", "flashmla_auto"):
        for is_hybrid in (True, False):
            assert 200_000 < keys(impl, is_fp8=True, is_hybrid=is_hybrid) < (1 << 28) / 1_152
    assert 2 * 100_000 < keys("flashmla_sparse_q8", is_fp8=False) < (1 << 28) / 576
    runner: Any = SimpleNamespace(prefill_attention_backend_str="fa3")
    assert max_keys(runner) > (1 << 19), "no matrix of scores for all"


def test_every_context_and_every_reason_have_a_series() -> None:
    """A reason that only the planner knew would stop the scheduler when it is counted."""
    assert set(SPLICED_TOKENS.values) == {context.value for context in Context}
    req, series = request(retracted_stain=True), Kept()
    req.pic.last_plan = LastPlan(dict.fromkeys(DropReason, 2), lost=Fallback.BATCH)
    Accounting(series).count_admitted(req, None, None, first_chunk=False)
    assert series.by_label(FALLBACKS) == {**{reason.value: 2 for reason in DropReason}, "batch": 1}
    assert list(FALLBACKS.values) == [reason.value for reason in REASONS], "no two reasons have one label"
    assert all(re.fullmatch(r"[A-Z].*\.", reason.description) for reason in REASONS)
