"""What kind of value a changed text is."""

from __future__ import annotations

import pytest

from sglang_pic.explain.cause import Cause
from sglang_pic.explain.fields import cause_of, field_around, first_value

CASES: dict[Cause | None, list[tuple[str, str, str, str]]] = {
    Cause.CLOCK: [
        ("Current time: 2026-07-08 14:", "10:18", "11:47", "\n\nYou are"),
        ("Today is 2026-01-0", "5", "6", ".\nYou"),
        ("Date: ", "Monday, 5 January 2026", "Tuesday, 6 January 2026", "\n"),
        ("It is now ", "9", "10", " o'clock"),
        ("<env>\nts=", "1767571200", "1767571261", "\n"),
        ("at 10:3", "1", "2", " am"),
        ("on ", "Jan 5", "Feb 7", ", in"),
        ("Today's date: ", "05/01/2026", "06/01/2026", "\n"),
    ],
    Cause.ID: [
        ('</thoughts>[{"id": "', "toolu_01M5p3hDr6CMMqAYqvNiYyFW", "call_4", '", "type"'),
        ("session: ", "3f2a9c1e", "b71d0e44", "\nYou"),
        ("request ", "550e8400-e29b-41d4-a716-446655440000", "650e8400-e29b-41d4-a716-446655440001", " of"),
        ("git at ", "c0dd4af", "ee894ec1", " for"),
    ],
    Cause.COUNT: [
        ("You have ", "19", "18", " turns left"),
        ("Tokens used: ", "12,034", "13,120", " of 200,000"),
        ("cost so far $", "0.12", "1.07", "\n"),
        ("step", "7", "12", " of the plan"),
    ],
    None: [
        ('"state": "', "open", "in_progress", '",'),
        ("You are Chief", " Product", " Technology", " Officer"),
        ("Fix ", "typos in bad.txt", "the build", ". Do not"),
        ("see", " file", " directory", " there"),
        ("You may", " ask", " answer", " now"),
    ],
}


@pytest.mark.parametrize(("cause", "case"), [(cause, case) for cause, cases in CASES.items() for case in cases])
def test_cause_of_a_changed_value(cause: Cause | None, case: tuple[str, str, str, str]) -> None:
    assert cause_of(*case) is cause


def test_field_around_takes_the_whole_value() -> None:
    assert field_around("on 2026-01-0", "5", "T10:00 we") == "2026-01-05T10:00"
    assert field_around("state: ", " open ", "now") == " open "


def test_first_value_ends_at_a_space_or_a_quote() -> None:
    assert first_value("10:18\nSession so far") == "10:18"
    assert first_value(" later") == ""
