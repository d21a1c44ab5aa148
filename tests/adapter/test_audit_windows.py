"""What the audit makes of its verdicts: which requests are drawn, whose windows they enter, what operators see."""

from __future__ import annotations

import logging

import pytest
import torch

from sglang_pic.adapter.audit.ledger import Window
from sglang_pic.adapter.audit.metrics import SUSPENDED, UNDECIDED_KL, WORST_KL
from sglang_pic.adapter.namespace import Namespace
from tests.adapter.audit_bench import PROMPT, Bench, logits_of

pytestmark = pytest.mark.usefixtures("no_groups")


@pytest.mark.parametrize(("rate", "change_rate", "shown"), [(0.1, 0.5, 0.5), (0.5, 0.1, 0.5)])
def test_requests_behind_a_changed_field_are_drawn_more_often(rate: float, change_rate: float, shown: float) -> None:
    settings = {"audit_rate": rate, "audit_change_rate": change_rate}
    bench, other = Bench(**settings), Bench(**settings)
    behind = [16 * (number % 2) for number in range(1_000)]
    drawn = [bench.serve(logits_of(PROMPT), num_behind_change=tokens) for tokens in behind]
    assert abs(sum(drawn[::2]) - 500 * rate) < 50
    assert abs(sum(drawn[1::2]) - 500 * shown) < 50
    assert bench.audit.report().change_rate == shown
    assert drawn == [other.serve(logits_of(PROMPT), num_behind_change=tokens) for tokens in behind], "on every rank"


@pytest.mark.parametrize(
    ("window", "fields", "words"),
    [
        (Window.CHANGED, {"num_behind_change": 16}, ("behind a changed field", 'core.edit "recompile"')),
        (
            Window.INHERITED,
            {"num_chunk_hit": 0, "num_inherited": 5},
            ("that splice nothing and stand on spliced rows",),
        ),
    ],
)
def test_bad_answers_of_one_kind_of_requests_turn_a_namespace_off(
    window: Window, fields: dict[str, int], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """However many of its other requests are well, those among them that splice and inherit."""
    bench, short = Bench(audit_kl_limit=0.2, audit_kl_cap=1.0), PROMPT[:10]
    for _ in range(bench.config.audit_min):
        assert bench.audit.is_on(Namespace("a"))
        for _ in range(3):
            bench.serve(logits_of(short), tokens=short, namespace="a", num_inherited=5)
        bench.serve(logits_of([1]), tokens=short, namespace="a", **fields)
        bench.run(10)
    assert not bench.audit.is_on(Namespace("a"))
    report = bench.audit.report()
    assert [shown.window for shown in report.suspended] == [window]
    plain, bad = report.windows[Window.PLAIN], report.windows[window]
    assert (plain.num_audited, plain.num_agreed, plain.mean_kl) == (48, 48, 0)
    assert (bad.num_audited, bad.num_agreed) == (16, 0)
    assert bad.mean_kl == pytest.approx(bad.worst_window_kl) == pytest.approx(report.worst_window_kl)
    assert report.mean_kl == pytest.approx(bad.mean_kl / 4)
    assert bench.series.level(SUSPENDED, window.value) == 1
    assert bench.series.level(SUSPENDED, "plain") == 0
    assert bench.series.level(WORST_KL, window.value) == bad.worst_window_kl
    (record,) = caplog.records
    for part in (f"16 audited requests {words[0]} KL", '"pic_audit_resume": 1', *words):
        assert part in record.getMessage()
    bench.audit.resume(0)
    assert bench.series.level(SUSPENDED, window.value) == 0
    assert bench.series.level(WORST_KL, window.value) == 0


def test_users_with_a_salt_each_are_watched_together(caplog: pytest.LogCaptureFixture) -> None:
    """None of them has enough audits to be switched off; whoever watches is told once, and again after it was well."""
    bench, short = Bench(audit_kl_limit=0.2, audit_kl_cap=1.0), PROMPT[:10]
    shown = bench.series.levels[UNDECIDED_KL.name, None]

    def audit(logits: torch.Tensor, users: range) -> None:
        for user in users:
            bench.serve(logits, tokens=short, namespace=f"user-{user}")
            bench.run(3)

    with caplog.at_level(logging.WARNING):
        audit(logits_of([1]), range(bench.config.audit_min - 1))
        assert (caplog.records, shown[-1], bench.audit.report().undecided) == ([], 0, None)
        audit(logits_of([1]), range(100, 110))
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        for part in ("16 namespaces", "last 16 audited", "No single namespace has the 16", "SPLICING STAYS ON"):
            assert part in record.getMessage()
        undecided = bench.audit.report().undecided
        assert undecided is not None
        assert (undecided.num_namespaces, undecided.num_audited, undecided.is_above_limit) == (25, 25, True)
        assert undecided.kl == shown[-1] > 0.2
        assert all(bench.audit.is_on(Namespace(f"user-{user}")) for user in range(25))
        audit(logits_of(short), range(200, 240))
        assert shown[-1] == 0
        audit(logits_of([1]), range(300, 340))
        assert len(caplog.records) == 2
        bench.audit.flush()
        assert (shown[-1], bench.audit.report().undecided) == (0, None)
