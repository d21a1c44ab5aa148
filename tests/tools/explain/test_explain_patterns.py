"""What harnesses do to prompts, after public bug reports: each pattern is named, and all it loses is counted.

Those that are held out have other words, sizes and places than the rules of `explain` were made on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from sglang_pic.core import CoreConfig
from sglang_pic.explain.cause import Cause
from tests.helpers.explain_fakes import (
    NUM,
    PATTERNS,
    RULES,
    Calls,
    breaks,
    call_of,
    growing,
    prose,
    question,
    serve,
    system,
    turns,
    user,
)

UUIDS = [
    "0b1c2f6e-93b4-4d9e-8f6a-1f0e2a9b7c11",
    "77d0a0f2-5c1b-4b44-a2a0-5be1c3f0d9aa",
    "c9f7be0a-1d2e-4a3b-9c4d-5e6f70819203",
    "1e2d3c4b-5a69-4788-9706-152433425160",
]
COMMITS = ["9fc1d02", "e07ab44", "0a1b9fe", "c77de10"]
NONCES = ["aZ3kQ9x", "Qp7Lm2t", "b8Rt5Yw", "Kd4Vn6s"]
DAYS = ["Monday, March 3", "Tuesday, March 4", "Friday, March 7", "Sunday, March 9"]


def inside(value: Callable[[int], str], num_before: int = 500) -> Callable[[], Calls]:
    """A value between two parts of the system prompt."""
    return lambda: growing(lambda n: f"{prose(31, num_before)}\n{value(n)}\n{prose(32, 80)}")


def note_before_the_message() -> Calls:
    note = system(f"Reminder. {prose(802, 90)}")
    for n in range(NUM):
        messages = [system(RULES), *turns(n), note, user(question(n))]
        yield call_of(messages, prose(200 + n, 60), index=n)


def messages_inserted() -> Calls:
    for n in range(NUM):
        notes = [user(f"Note {k}: {prose(1500 + k, 60)}") for k in range(n)]
        yield call_of([system(RULES), *notes, *turns(3), user("go")], index=n)


HELD_OUT: dict[str, tuple[Callable[[], Calls], Cause]] = {
    "uuid in a tag": (inside(lambda n: f'<conversation id="{UUIDS[n]}">'), Cause.ID),
    "run in an address": (inside(lambda n: f"See h.example/cb?run={UUIDS[n].replace('-', '')[:20]}&v=2", 60), Cause.ID),
    "commit": (inside(lambda n: f"HEAD is at {COMMITS[n]} on main", 200), Cause.ID),
    "nonce": (inside(lambda n: f"nonce={NONCES[n]}", 20), Cause.ID),
    "date with zone": (inside(lambda n: f"Date: 2025-11-0{n + 1}T09:1{n}:22+02:00", 700), Cause.CLOCK),
    "date in words": (inside(lambda n: f"Today is {DAYS[n]}, 2026.", 30), Cause.CLOCK),
    "twelve hours": (inside(lambda n: f"It is {n + 7}:0{n} PM in Berlin."), Cause.CLOCK),
    "milliseconds": (inside(lambda n: f'{{"ts": 17640{n}4482{n}5{n}, "tz": "UTC"}}'), Cause.CLOCK),
    "hours ago": (inside(lambda n: f"Last backup: {n + 2} hours ago"), Cause.CLOCK),
    "budget": (inside(lambda n: f"You have {40 - n} tool calls left and ${12 - n}.50 of budget."), Cause.FIELD),
    "load": (inside(lambda n: f"| cpu | mem |\n| {31 + n} % | {4 + n}.{n} GiB |", 40), Cause.FIELD),
    "step": (inside(lambda n: f"Step {n + 1}/40", 20), Cause.FIELD),
    "tokens used": (inside(lambda n: f"context used: {12345 + 1733 * n:,} of 200,000 tokens", 300), Cause.FIELD),
    "note before the message": (note_before_the_message, Cause.MOVED),
    "messages inserted": (messages_inserted, Cause.INSERTED),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PATTERNS, *HELD_OUT])
def test_a_pattern_is_named_and_all_that_it_loses_is_counted(name: str) -> None:
    make, cause = (PATTERNS | HELD_OUT)[name]
    lost = Counter[Cause]()
    for outcome, found in breaks(serve(make(), CoreConfig())):
        if found is not None:
            lost[found.cause] += found.num_lost
            assert found.num_spliced <= found.num_lost <= found.num_behind
        else:
            assert not outcome.num_repeated, "what repeats has a cause"
    assert lost[cause] >= 0.8 * lost.total() > 0, lost
    assert "In the harness" in cause.advice
