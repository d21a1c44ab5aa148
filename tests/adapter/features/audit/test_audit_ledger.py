"""The audit's windows and switch: what turns a namespace off, what turns it on, what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pic.adapter.features.audit.ledger import AuditLedger, Window
from sglang_pic.adapter.namespace import Namespace
from sglang_pic.config import PicConfig

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
