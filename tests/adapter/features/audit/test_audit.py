"""The audit against SGLang's own allocator: when it runs, what it computes, that every slot comes back, and what it
makes of its verdicts: which requests are drawn, whose windows they enter, what operators see."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pic.adapter.features.audit import audit_hooks
from sglang_pic.adapter.features.audit.audit import is_drawn
from sglang_pic.adapter.features.audit.audit_metrics import SKIPPED, SUSPENDED, WORST_KL, AuditSkip
from sglang_pic.adapter.features.audit.ledger import AuditLedger, Window
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.adapter.probe.prompt_pass import STEP_TOKENS, PromptPass
from sglang_pic.adapter.serve.fallback import Fallback
from sglang_pic.adapter.serve.feature import Features
from sglang_pic.adapter.serve.state import RequestState
from sglang_pic.config import PicConfig
from tests.helpers.audit_bench import POOL, PROMPT, VOCAB, Bench, Runner, logits_of
from tests.helpers.builders import hooks_of, make_stations, request, request_state

pytestmark = pytest.mark.usefixtures("no_groups")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_evictable", [0, POOL])
def test_the_prompt_is_computed_in_steps_and_leaves_nothing(page_size: int, num_evictable: int) -> None:
    """Who comes while the scheduler waits for a step is served next, not behind another one."""
    bench, steps = Bench(page_size=page_size, num_evictable=num_evictable), []
    assert bench.serve()
    for _ in range(6):
        bench.audit.step_if_idle(bench.scheduler)
        steps.append(bench.runner.num_steps)
    assert steps == [1, 1, 2, 2, 3, 3]
    bench.run()
    report = bench.audit.report()
    assert (report.num_audited, report.num_agreed, report.mean_kl) == (1, 1, 0)
    # Where a pass of SGLang's leaves no event, the scheduler waits for the whole stream, if no other pass left one.
    assert (bench.runner.num_steps, bench.runner.shared_read_done_event) == (3, None)
    assert bench.free + bench.tree.evictable_size() == POOL
    assert not bench.runner.req_to_token_pool.req_to_token.any(), "what pads batches reads this row"
    assert not bench.audit.has_work


def test_the_divergence_is_that_of_the_whole_vocabulary() -> None:
    bench = Bench()
    spliced = logits_of(PROMPT[1:])
    bench.audit_one(spliced)
    exact = torch.softmax(logits_of(PROMPT), -1)
    expected = float((exact * (exact.log() - torch.log_softmax(spliced, -1))).sum())
    assert bench.audit.report().mean_kl == pytest.approx(expected, rel=1e-5)
    assert bench.audit.report().num_agreed == int(exact.argmax() == spliced.argmax())


@pytest.mark.parametrize(
    ("spliced", "full", "counts", "agreed", "kl"),
    [
        # As it counts: one request would drown all others.
        ([float("nan")] * VOCAB, [], (1, 0, 0), 0, PicConfig().audit_kl_cap),
        ([float("-inf")] * VOCAB, [], (1, 0, 0), 0, PicConfig().audit_kl_cap),
        # A full computation that gives no distribution says nothing of splices.
        ([], [float("nan")], (0, 1, 0), 0, 0),
        ([], [float("inf")], (0, 1, 0), 0, 0),
        ([], [float("-inf")] * VOCAB, (0, 1, 0), 0, 0),
        # Tokens that the model rules out are no fault.
        ([float("-inf")], [float("-inf")], (1, 0, 0), 1, 0),
    ],
)
def test_what_is_no_distribution_is_as_bad_as_can_be_or_says_nothing(
    spliced: list[float],
    full: list[float],
    counts: tuple[int, int, int],
    agreed: int,
    kl: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spliced` and `full` are the first logits of the two computations, where they are not the model's."""
    bench = Bench()
    forward = bench.runner.forward

    def given(logits: torch.Tensor, first: list[float]) -> torch.Tensor:
        logits[..., : len(first)] = torch.tensor(first)
        return logits

    def run(batch: Any) -> Any:
        result = forward(batch)
        given(result.logits_output.next_token_logits, full)
        return result

    monkeypatch.setattr(bench.runner, "forward", run)
    bench.audit_one(given(logits_of(PROMPT), spliced))
    report = bench.audit.report()
    assert (bench.counts, report.num_agreed, report.mean_kl, bench.free) == (counts, agreed, kl, POOL)
    assert bench.series.by_label(SKIPPED) == ({AuditSkip.FULL_NOT_FINITE.value: 1} if counts[1] else {})


def test_requests_with_no_splice_do_not_turn_the_wheel() -> None:
    """Ranks see the same spliced requests; chunks that come before the last one are no requests."""
    bench, other = Bench(audit_rate=0.5), Bench(audit_rate=0.5)
    drawn = []
    for number in range(100):
        for chunk_hit, end in ((0, len(PROMPT)), (64, len(PROMPT) - 1)):
            state = request_state(chunk_hit=chunk_hit)
            bench.audit.on_admitted(request(PROMPT, pic=state, extend_end=end))
            assert not is_drawn(state)
        drawn.append(bench.serve(logits_of([number])))
    assert drawn == [other.serve(logits_of([number])) for number in range(100)]


def test_nothing_runs_while_a_request_waits_or_a_pass_awaits_its_sampling() -> None:
    """With a grammar SGLang samples later, from logits in a buffer that another pass may write."""
    bench = Bench()
    bench.serve()
    bench.scheduler.is_idle = False
    bench.run()
    launched = SimpleNamespace(delay_sample_func="to be sampled")
    bench.scheduler.result_queue.append(("a batch", launched))
    for name, waits, nothing in (
        ("waiting_queue", ["a request"], []),
        ("chunked_req", "a request with chunks left", None),
        ("result_queue", [("a batch", launched)], []),
    ):
        setattr(bench.scheduler, name, waits)
        for _ in range(100):
            bench.audit.step_if_due(bench.scheduler)
        setattr(bench.scheduler, name, nothing)
    assert bench.runner.num_steps == 0
    launched.delay_sample_func = None  # type: ignore[assignment]
    bench.scheduler.result_queue.append(("a batch", launched))
    steps = []
    for _ in range(64):
        bench.audit.step_if_due(bench.scheduler)
        steps.append(bench.runner.num_steps)
    assert steps[0] == 1, "it has been waiting for long"
    assert max(later - earlier for earlier, later in zip(steps, steps[15:], strict=False)) == 1
    assert bench.audit.report().num_audited == 1


def test_a_busy_server_waits_for_a_step_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that arrives waits for one pass at most."""
    bench, waited = Bench(), []
    monkeypatch.setattr(torch.cpu.Event, "synchronize", lambda _: waited.append(bench.runner.num_steps), raising=False)
    bench.serve()
    for _ in range(48):
        bench.audit.step_if_due(bench.scheduler)
    assert (bench.runner.num_steps, waited) == (3, [1, 2])


@pytest.mark.feature("PD disaggregation")
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_rounds_of_prefill_count_as_those_of_decoding(mode: ForwardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill server never decodes, and is not idle while rows are sent or awaited."""
    bench, hooked = Bench(), hooks_of(monkeypatch, audit_hooks)
    audit_hooks.install(bench.audit)
    bench.serve()
    bench.scheduler.is_idle = False
    for _ in range(64):
        batch = SimpleNamespace(forward_mode=mode)
        hooked["after Scheduler.process_batch_result"](None, bench.scheduler, batch, None)
    assert (bench.audit.report().num_audited, bench.audit.has_work) == (1, False)


def test_slots_that_a_request_needs_go_back_and_the_prompt_begins_anew_but_not_for_ever() -> None:
    bench = Bench()
    bench.serve()
    bench.run(2)
    assert (bench.audit.num_slots, bench.free) == (len(PROMPT), POOL - len(PROMPT))
    assert bench.audit.make_room(None)
    assert (bench.free, bench.audit.num_slots) == (POOL, 0)
    bench.run()
    assert bench.counts == (1, 0, 0)
    assert bench.audit.report().mean_kl == 0, "nothing of the first attempt was used"
    bench.serve()
    for _ in range(10):
        bench.run(1)
        bench.audit.make_room(None)
    bench.run()
    assert bench.counts == (1, 1, 0)
    assert (bench.free, bench.audit.has_work) == (POOL, False)


def test_the_next_pass_leaves_the_logits_of_a_prompt_alone() -> None:
    runner, slots, (first, second) = Runner(), torch.arange(1, 11), np.arange(20).reshape(2, 10)
    passes = [PromptPass(runner, tokens, slots) for tokens in (first, second)]  # type: ignore[arg-type]
    for each in passes:
        each.step()
    for each, tokens in zip(passes, (first, second), strict=True):
        assert torch.equal(each.logits, logits_of(tokens.tolist()))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_prompt_takes_a_quarter_of_the_pool_at_most(page_size: int) -> None:
    """It would evict what requests come back to, for one number."""
    longest, bench = POOL // 4, Bench(page_size=page_size, num_evictable=POOL)
    for tokens in ([5] * (longest + 1), [6] * longest):
        bench.audit_one(tokens=tokens)
    assert bench.series.by_label(SKIPPED) == {AuditSkip.TOO_LONG.value: 1}
    assert bench.counts == (1, 1, 0)
    assert bench.tree.evictable_size() == POOL - longest


@pytest.mark.parametrize("moment", ["release_memory_occupation", "begin_weight_update"])
def test_nothing_is_computed_once_memory_or_weights_are_not_the_servers(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To SGLang a server whose audits wait is idle: it may be told to unmap its weights or let others write them."""
    bench = Bench()
    hooked = hooks_of(monkeypatch, audit_hooks)
    audit_hooks.install(bench.audit)
    for _ in range(3):
        bench.serve()
    bench.audit.step_if_idle(bench.scheduler)
    waited: list[bool] = []
    monkeypatch.setattr(torch.cpu.Event, "synchronize", lambda _: waited.append(True), raising=False)
    hooked[f"before SchedulerWeightUpdaterManager.{moment}"]("SGLang's manager of weights", "a request")
    assert waited, "the step that is queued has ended"
    assert bench.free == POOL
    bench.run()
    assert (bench.runner.num_steps, bench.audit.report().num_skipped) == (1, 3)


@pytest.mark.parametrize("moment", ["flush", "weights"])
def test_a_flush_and_other_weights_empty_the_windows_and_the_queue(moment: str) -> None:
    """What was spliced before is gone from the tree, or was of other weights, and says nothing of what comes."""
    bench = Bench()
    for _ in range(bench.config.audit_min - 1):
        bench.serve_broken()
    for _ in range(3):
        bench.serve()
    bench.run(2)
    assert bench.free < POOL, "in the middle of a prompt"
    if moment == "flush":
        bench.audit.on_flush()
    else:
        bench.audit.on_weights(bench.tree)  # type: ignore[arg-type]
    assert (bench.free, bench.audit.has_work) == (POOL, False)
    bench.run()
    assert bench.counts == (bench.config.audit_min - 1, 3, 0)
    if moment == "weights":
        bench.serve_broken()
        bench.audit.on_flush()
    bench.serve_broken()
    assert bench.audit.report().num_audited == bench.config.audit_min
    assert bench.audit.report().suspended == []


def test_rows_that_an_update_of_weights_left_are_no_reason_to_turn_a_namespace_off() -> None:
    """SGLang may be told to keep them: they are prefixes of requests and of new donors until the cache is flushed.

    The hooks say several times that the weights changed, at last after SGLang has flushed the cache.
    """
    bench, other_weights = Bench(audit_min=1), torch.full((VOCAB,), float("nan"))
    bench.audit.on_weights(bench.tree)  # type: ignore[arg-type]
    bench.audit_one()
    assert bench.counts == (1, 0, 0), "there were no rows"
    for _ in range(2):
        bench.audit.on_weights(bench.tree)  # type: ignore[arg-type]
        bench.audit_one(other_weights)
    assert (bench.counts, bench.audit.ledger.is_on(Namespace())) == ((1, 2, 0), True)
    assert bench.series.by_label(SKIPPED) == {AuditSkip.WEIGHTS.value: 2}
    bench.audit.on_flush()
    bench.audit.on_weights(bench.tree)  # type: ignore[arg-type]
    bench.audit_one(other_weights)
    assert (bench.counts, bench.audit.ledger.is_on(Namespace())) == ((2, 2, 0), False)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_an_adapter_is_used_as_long_as_it_is_on_the_device(
    is_overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loads beside forward passes is there at another round on each rank; no adapter of a batch before stays."""
    loading = SimpleNamespace(enable_lora_overlap_loading=is_overlapped)
    monkeypatch.setattr("sglang_pic.adapter.probe.prompt_pass.get_lora", lambda: loading)
    bench, there, prepared = Bench(), {"a": 1}, []
    bench.runner.lora_manager = SimpleNamespace(
        memory_pool=SimpleNamespace(uid_to_buffer_id=there),
        prepare_lora_batch=lambda batch: prepared.append((*batch.lora_ids, *batch.extend_seq_lens_cpu)),
    )
    bench.audit_one()
    assert prepared == [(None, STEP_TOKENS), (None, STEP_TOKENS), (None, 44)]
    prepared.clear()
    bench.audit_one(lora_id="a")
    assert [adapter for adapter, _ in prepared] == ([] if is_overlapped else ["a"] * 3)
    bench.serve(lora_id="a")
    bench.run(1)
    del there["a"]
    bench.run()
    assert bench.counts == ((1, 2, 0) if is_overlapped else (2, 1, 0))
    assert bench.free == POOL
    assert set(bench.series.by_label(SKIPPED)) == {AuditSkip.ADAPTER.value}


def drawn_state() -> RequestState:
    state = request_state()
    state.drawn_chunk = state.last_chunk
    return state


def test_logits_are_those_of_the_drawn_requests_by_place() -> None:
    """A pass that gives no logits is not audited: scoring of several items has its numbers from elsewhere."""
    bench = Bench()
    reqs = [
        request(PROMPT, pic=drawn_state() if drawn else request_state(), output_ids=output_ids)
        for drawn, output_ids in ((False, []), (True, []), (True, [7]))
    ]
    watcher = bench.audit
    told = watcher.watch(SimpleNamespace(reqs=reqs))  # type: ignore[arg-type]
    assert told is not None
    logits = torch.stack([torch.full((VOCAB,), float("nan")), logits_of(PROMPT), torch.zeros(VOCAB)])
    told(SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits)))
    logits.zero_()
    assert watcher.watch(SimpleNamespace(reqs=reqs)) is None, "a drawn request is kept once"  # type: ignore[arg-type]
    bench.run()
    assert (bench.audit.report().num_audited, bench.audit.report().mean_kl) == (1, 0)
    req = request(pic=drawn_state())
    told = watcher.watch(SimpleNamespace(reqs=[req]))  # type: ignore[arg-type]
    assert told is not None
    told(SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None)))
    assert (bench.audit.report().num_skipped, bench.audit.has_work) == (1, False)


def test_a_diverted_request_stays_so() -> None:
    """Its rows are among those of requests that opted out. A flush begins to count generations anew."""
    bench, key = Bench(), Namespace("bad")
    eligibility = make_stations(features=Features([bench.audit])).eligibility
    for _ in range(2):
        while bench.audit.ledger.is_on(key):
            bench.serve_broken("bad")
        state = request_state(namespace=key, generation=bench.audit.ledger.generation(key), diverted=Fallback.AUDIT)
        bench.audit.resume(0)
        assert eligibility.diversion(state) is Fallback.AUDIT
    while bench.audit.ledger.is_on(key):
        bench.serve_broken("bad")
    bench.audit.on_flush()
    assert bench.audit.resume(0)
    assert (bench.audit.ledger.is_on(key), bench.audit.ledger.generation(key)) == (True, state.epoch.generation)
    assert eligibility.diversion(state) is Fallback.AUDIT


def test_what_was_spliced_before_a_suspension_is_not_computed_after_it() -> None:
    bench = Bench(audit_min=1)
    bench.serve(torch.full((VOCAB,), float("nan")), tokens=PROMPT[:10], namespace="bad")
    bench.serve(namespace="good")
    bench.serve(torch.full((VOCAB,), float("nan")), tokens=PROMPT[:11], namespace="bad")
    bench.run(2)
    assert not bench.audit.ledger.is_on(Namespace("bad"))
    bench.audit.resume(0)
    bench.run()
    assert bench.counts == (2, 1, 0)


def test_what_waits_is_bounded() -> None:
    bench = Bench()
    for _ in range(40):
        bench.serve()
    assert bench.counts == (0, 24, 16)


@pytest.mark.feature("namespaces that the audit switched off")
@pytest.mark.parametrize("sends_rows", [False, True])
def test_corruption_turns_its_namespace_off_and_says_so(sends_rows: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(audit_kl_limit=0.2, audit_kl_cap=1.0, sends_rows=sends_rows)
    short = PROMPT[:10]
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            bench.serve(logits_of([1]), tokens=short, namespace="bad")
            bench.serve(tokens=short, namespace="good")
            bench.run(10)
    assert not bench.audit.ledger.is_on(Namespace("bad"))
    assert bench.audit.ledger.is_on(Namespace("good"))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    for part in ("extra_key='bad'", "audit_kl_limit is 0.2", "/set_internal_state", '"pic_audit_resume": 1', "16 aud"):
        assert part in message
    assert ("/flush_cache" in message) == sends_rows
    (shown,) = bench.audit.report().suspended
    assert (shown.number, shown.extra_key, shown.num_audited) == (1, "bad", bench.config.audit_min)
    old = request_state(namespace=Namespace("bad"), generation=0)
    assert bench.audit.resume(1)
    assert bench.audit.ledger.is_on(Namespace("bad"))
    assert bench.audit.diverts(old), "rows of the generation before reach nobody"
    assert not bench.audit.resume(1)
    assert bench.free == POOL


@pytest.mark.parametrize(("rate", "change_rate", "larger"), [(0.1, 0.5, 0.5), (0.5, 0.1, 0.5)])
def test_requests_behind_a_changed_field_are_drawn_more_often(rate: float, change_rate: float, larger: float) -> None:
    settings = {"audit_rate": rate, "audit_change_rate": change_rate}
    bench, other = Bench(**settings), Bench(**settings)
    behind = [16 * (number % 2) for number in range(1_000)]
    drawn = [bench.serve(behind_change=tokens) for tokens in behind]
    assert abs(sum(drawn[::2]) - 500 * rate) < 50
    assert abs(sum(drawn[1::2]) - 500 * larger) < 50
    assert drawn == [other.serve(behind_change=tokens) for tokens in behind], "on every rank"


@pytest.mark.parametrize(
    ("window", "fields", "words"),
    [
        (Window.CHANGED, {"behind_change": 16}, ("after a changed field", 'core.edit "recompile"')),
        (Window.INHERITED, {"chunk_hit": 0, "inherited": 5}, ("that splice nothing and inherit spliced rows",)),
    ],
)
def test_bad_answers_of_one_kind_of_requests_turn_a_namespace_off(
    window: Window, fields: dict[str, int], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """However many of its other requests are well, those among them that splice and inherit."""
    bench, short = Bench(audit_kl_limit=0.2, audit_kl_cap=1.0), PROMPT[:10]
    for _ in range(bench.config.audit_min):
        assert bench.audit.ledger.is_on(Namespace("a"))
        for _ in range(3):
            bench.serve(tokens=short, namespace="a", inherited=5)
        bench.serve(logits_of([1]), tokens=short, namespace="a", **fields)
        bench.run(10)
    assert not bench.audit.ledger.is_on(Namespace("a"))
    report = bench.audit.report()
    assert [shown.window for shown in report.suspended] == [window]
    plain, bad = report.windows[Window.PLAIN], report.windows[window]
    assert (plain.num_audited, plain.mean_kl, bad.num_audited) == (48, 0, 16)
    assert report.mean_kl == pytest.approx(bad.mean_kl / 4)
    shown = [(SUSPENDED, window.value), (SUSPENDED, "plain"), (WORST_KL, window.value)]
    assert [bench.series.level(*each) for each in shown] == [1, 0, bad.worst_window_kl]
    (record,) = caplog.records
    for part in (f"16 audited requests {words[0]} KL", '"pic_audit_resume": 1', *words):
        assert part in record.getMessage()
    bench.audit.resume(0)
    assert [bench.series.level(*each) for each in shown] == [0, 0, 0]


LIMITS = PicConfig(audit_kl_limit=0.5, audit_kl_cap=2.0, audit_window=8, audit_min=4)
A, B = Namespace("a"), Namespace("a", "salt")


def enter(ledger: AuditLedger, namespace: Namespace, *kls: float, window: Window = Window.PLAIN) -> list[int]:
    """Enter audited requests of the present generation; the numbers of the suspensions they bring about."""
    generation = ledger.generation(namespace)
    entered = [ledger.observe(namespace, generation, kl, agreed=kl < 1, window=window) for kl in kls]
    return [suspension.number for suspension in entered if suspension is not None]


def test_a_full_measure_turns_one_namespace_off() -> None:
    ledger = AuditLedger(LIMITS)
    assert enter(ledger, A, 3, 3, 3) == [], "too few to decide"
    assert enter(ledger, A, 0.1) == [1]
    assert not ledger.is_on(A)
    assert ledger.is_on(B), "the salt is part of the namespace"
    (suspension,) = ledger.suspensions
    assert (suspension.extra_key, suspension.has_salt) == ("a", False)
    assert suspension.kl == pytest.approx((3 * 2.0 + 0.1) / 4), "each counts up to the cap"
    assert (suspension.num_audited, suspension.num_agreed) == (4, 1)
    assert enter(ledger, A, 9, 9) == [], "what was drawn before it went off changes nothing"


def test_one_request_alone_decides_nothing_and_old_ones_leave_the_window() -> None:
    """Whatever its KL, even infinite: a window of honest ones outweighs it."""
    ledger = AuditLedger(LIMITS)
    assert enter(ledger, A, *[0.01] * 5, float("inf"), *[0.01] * 20) == []
    ledger.flush()
    enter(ledger, A, 1.9, *[0.0] * 8)
    assert ledger.worst() == 0
    assert enter(ledger, A, 1.9, 1.9) == [], "two of eight are below the limit; a third, long past, would not be"


@pytest.mark.parametrize("window", Window)
def test_each_window_decides_alone(window: Window) -> None:
    """Ten times as many good requests of another window change nothing: rates differ, so no mean is over both."""
    ledger = AuditLedger(LIMITS)
    other = next(each for each in Window if each is not window)
    assert enter(ledger, A, *[0.0] * 40, window=other) == []
    assert enter(ledger, A, 3, 3, 3, window=window) == []
    assert enter(ledger, B, *[0.1] * 4, window=window) == []
    assert (ledger.worst(window), ledger.worst(other)) == (pytest.approx(0.1), 0)
    assert enter(ledger, A, 3, window=window) == [1]
    assert not ledger.is_on(A), "in all windows"
    assert [suspension.window for suspension in ledger.suspensions] == [window]
    assert enter(ledger, A, *[3] * 9, window=other) == []
    ledger.resume(1)
    for each in Window:
        assert enter(ledger, A, 3, 3, 3, window=each) == [], "all are empty"


def test_on_again_is_another_generation_with_an_empty_window() -> None:
    ledger = AuditLedger(LIMITS)
    enter(ledger, A, *[3] * 4)
    assert ledger.resume(7) == [], "no such number"
    assert not ledger.is_on(A)
    assert [ended.number for ended in ledger.resume(1)] == [1]
    assert ledger.is_on(A)
    assert ledger.generation(A) == 1
    assert ledger.observe(A, 0, 9.0, agreed=False) is None, "spliced in the generation before"
    assert enter(ledger, A, 3, 3, 3) == []
    assert enter(ledger, A, 3) == [2], "numbers are not given twice"
    assert ledger.resume(1) == []
    assert len(ledger.resume(0)) == 1


def test_memory_is_bounded_and_what_is_off_stays_off() -> None:
    ledger = AuditLedger(LIMITS, max_namespaces=3)
    enter(ledger, A, *[3] * 4)
    for number in range(10):
        enter(ledger, Namespace(f"other-{number}"), 0.0)
    assert not ledger.is_on(A)
    assert len(ledger._records) == 3
    for number in range(2):
        enter(ledger, Namespace(f"bad-{number}"), *[3] * 4)
    assert not ledger.is_on(Namespace("unknown")), "three are off, and a fourth could not be watched"
    ledger.resume(0)
    assert not ledger.is_on(Namespace("unknown")), "the generations have to be kept"
    ledger.flush()
    assert ledger.is_on(Namespace("unknown"))


@given(st.lists(st.floats(0, 0.5), max_size=60))
def test_windows_below_the_limit_never_turn_anything_off(kls: list[float]) -> None:
    ledger = AuditLedger(LIMITS)
    assert enter(ledger, A, *kls, *[0.5] * 9) == []
    assert ledger.worst() <= 0.5


@given(st.lists(st.floats(0, 0.1), max_size=40), st.integers(1, 6), st.floats(2, 20))
def test_a_corruption_is_found_within_fifty_requests(honest: list[float], every: int, corrupted: float) -> None:
    """With the defaults: however long all was well, and if only every sixth request meets the corruption."""
    ledger = AuditLedger(PicConfig())
    assert enter(ledger, A, *honest) == []
    assert enter(ledger, A, *[corrupted if number % every == 0 else 0.03 for number in range(50)]) == [1]
