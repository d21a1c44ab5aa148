"""Why a prefix broke: hand-made prompts, generated workloads, real sessions; changed values, and where texts agree."""

from __future__ import annotations

import asyncio
import html
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import load
from pic_traces.session import Call, Message

from sglang_pic.cli import main
from sglang_pic.core import as_tokens
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.diagnose import Break
from sglang_pic.explain.fields import cause_of, field_around, first_value
from sglang_pic.explain.grouping import Findings
from sglang_pic.explain.rejoin import MAX_SEARCH, WINDOW, align, contained_share
from sglang_pic.nonces import NONCES, strip
from tests.conftest import ROOT
from tests.helpers.explain_fakes import breaks, call_of, chat, prose, serve


def diagnose(*calls: Call) -> list[Break | None]:
    return [found for _, found in breaks(serve(calls))]


def second(first: list[Message], then: list[Message], **options: str | int) -> Break:
    """What broke the second of two calls of one session."""
    _, found = diagnose(call_of(first), call_of(then, index=1, **options))
    return found


BODY = prose(1)


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("Current time: 2026-01-05 10:31:07.", "Current time: 2026-01-05 10:32:40.", Cause.CLOCK),
        ("Session id: 3f2a9c1e77.", "Session id: b71d0e44aa.", Cause.ID),
        ("You have 19 turns left.", "You have 18 turns left.", Cause.FIELD),
        ("Mode: planning.", "Mode: writing.", Cause.FIELD),
        ("Time: 10:31.\nMessages: 4.\nModel: birch.", "Time: 10:33.\nMessages: 6.\nModel: cedar two.", Cause.CLOCK),
        (prose(2), prose(3), Cause.REPLACED),
        ("", prose(4), Cause.INSERTED),
        (prose(5), "", Cause.REMOVED),
        (prose(6), "[cleared]", Cause.REMOVED),
    ],
)
def test_what_changed_in_front_of_the_same_text(old: str, new: str, cause: Cause) -> None:
    head = "You are an agent.\n"
    found = second(chat(f"{head}{old}\n{BODY}", "Go."), chat(f"{head}{new}\n{BODY}", "Go."))
    assert found.cause is cause
    assert found.num_lost > 100
    assert None not in (found.old_len, found.new_len)


def test_texts_are_cut_out_exactly() -> None:
    found = second(chat(f"Mode: planning.\n{BODY}", "Go."), chat(f"Mode: writing.\n{BODY}", "Go."))
    assert (found.old, found.new) == (" planning", " writing")
    assert found.before.endswith("Mode:")
    assert found.after.startswith(".\n")
    assert (found.old_len, found.new_len) == (1, 1)


def test_other_agent_and_other_task() -> None:
    code = prose(30, 200)
    writer = call_of(chat(f"You are the writer. {prose(31)}", code), agent="writer")
    reviewer = call_of(chat(f"You are the reviewer. {prose(32)}", f"Review: {code}"), index=1, agent="reviewer")
    fresh = call_of(chat(f"You are the writer. {prose(31)}", prose(33)), session="t", agent="writer")
    causes = [found and found.cause for found in diagnose(writer, reviewer, fresh)]
    assert causes == [None, Cause.AGENT, Cause.NEW_TASK]


def test_continuing_a_retry_and_a_step_back_are_no_breaks() -> None:
    first, then = chat("You are.", BODY), chat("You are.", BODY, "ok", "go on")
    found = diagnose(call_of(first), call_of(then, index=1), call_of(first, "other", index=2), call_of(then, index=3))
    assert found == [None, None, None, None]


def test_places_that_look_alike_are_one_group() -> None:
    calls = [
        call_of(chat(f"Number {n} of it. Time: 10:{n + 10}:00.\n{BODY}", "Go."), session=f"s{n}") for n in range(5)
    ]
    findings = Findings()
    for outcome in serve(calls):
        findings.add(outcome)
    (group,) = findings.ranked()
    (place,) = group.places
    assert place.num_calls == group.total.num_calls == 4
    assert place.num_lost == sum(item.num_lost for item in diagnose(*calls) if item)


def test_call_order_of_sessions_is_kept() -> None:
    """Agents of one session do not end each other's history."""
    calls, told = [], [prose(40, 2_000)]
    for number in range(3):
        review = chat(f"You are the reviewer. {prose(31)}", f"Review: {prose(50 + number)}")
        calls.append(call_of(chat(f"You are the writer. {prose(31)}", *told), index=2 * number, agent="writer"))
        calls.append(call_of(review, index=2 * number + 1, agent="reviewer"))
        told += ["ok", prose(60 + number)]
    found = diagnose(*calls)
    assert Cause.COMPACTION not in {item.cause for item in found if item}


CASES: dict[Cause | None, list[tuple[str, str, str, str]]] = {
    Cause.CLOCK: [
        ("Current time: 2026-07-08 14:", "10:18", "11:47", "\n\nYou are"),
        ("Today is 2026-01-0", "5", "6", ".\nYou"),
        ("Date: ", "Monday, 5 January 2026", "Tuesday, 6 January 2026", "\n"),
        ("It is now ", "9", "10", " o'clock"),
        ("<env>\nts=", "1767571200", "1767571261", "\n"),
        ("at 10:3", "1", "2", " am"),
        ("现在是 14时", "03", "04", "分"),
        ("Uhrzeit: 14 Uhr ", "03", "04", ".\n"),
        ("on ", "Jan 5", "Feb 7", ", in"),
        ("Today's date: ", "05/01/2026", "06/01/2026", "\n"),
    ],
    Cause.ID: [
        ('</thoughts>[{"id": "', "toolu_01M5p3hDr6CMMqAYqvNiYyFW", "call_4", '", "type"'),
        ("session: ", "3f2a9c1e", "b71d0e44", "\nYou"),
        ("request ", "550e8400-e29b-41d4-a716-446655440000", "650e8400-e29b-41d4-a716-446655440001", " of"),
        ("git at ", "c0dd4af", "ee894ec1", " for"),
    ],
    Cause.FIELD: [
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


def test_the_whole_value_is_taken_and_ends_at_a_space_or_a_quote() -> None:
    assert field_around("on 2026-01-0", "5", "T10:00 we") == "2026-01-05T10:00"
    assert field_around("state: ", " open ", "now") == " open "
    assert first_value("10:18\nSession so far") == "10:18"
    assert first_value(" later") == ""


def test_every_cause_has_a_share_on_recorded_logs() -> None:
    record = json.loads((ROOT / "bench" / "results" / "explain-causes.json").read_text())
    seen = {cause for counts in record["sets"].values() for cause in counts["causes"]}
    # The recorded sets are of agents without a known nonce.
    assert seen - set(record["merged"]) == {cause.value for cause in Cause} - {Cause.NONCE.value}


few = st.lists(st.integers(0, 3), max_size=60)


@given(few, few, few)
def test_what_is_claimed_is_equal_and_as_near_as_is_known(old: list[int], new: list[int], tail: list[int]) -> None:
    """A common tail of a whole window is one place where both are in step, so the answer is at least as near."""
    rest = [7, *range(100, 100 + WINDOW), *tail]
    found = align(as_tokens(old + rest), as_tokens(new + rest))
    left, right = (old + rest)[found.old_len :], (new + rest)[found.new_len :]
    assert found.same_len >= WINDOW
    assert left[: found.same_len] == right[: found.same_len]
    assert found.old_len + found.new_len <= len(old) + len(new)


@given(few, few)
def test_texts_with_nothing_in_common_are_never_in_step(old: list[int], new: list[int]) -> None:
    assert align(as_tokens(old), as_tokens([value + 10 for value in new])) is None


def test_the_end_of_the_prompt_counts_where_there_is_no_window_left() -> None:
    old = as_tokens([1, 2, 50, 51, 52, 9, 9, 9])
    assert align(old, as_tokens([3, 50, 51, 52])) == (2, 1, 3)
    assert align(old, as_tokens([3, 50, 51])) is None, "two tokens are chance"
    assert align(old, as_tokens([3, 50, 51, 52, 4])) is None, "the prompt goes on otherwise"


def test_work_is_bounded_and_a_period_of_one_token_is_in_step_at_once() -> None:
    tail = np.arange(1_000, 2_000, dtype=np.int32)
    far = np.concatenate([np.zeros(MAX_SEARCH, np.int32), tail])
    assert align(far, tail) is None
    same = np.full(50_000, 5, np.int32)
    assert align(same, same)[:2] == (0, 0)


def test_contained_share_counts_covered_tokens() -> None:
    whole = as_tokens(range(100))
    part = as_tokens([*range(10, 30), 500, *range(40, 60)])
    assert contained_share(part, whole, 8) == 40 / 41
    assert contained_share(whole[:7], whole, 8) == 0.0
    assert contained_share(part[::-1].copy(), whole, 8) == 0.0


HEADER = "x-anthropic-billing-header: cc_version=2.1.177.{0:02x}c; cc_entrypoint=sdk-cli; cch={0:05x};"
RUN = "Runtime: agent=main | session=agent:main:cron:daily{} | host=h | os=Linux"
FORMS = [
    ("claude-code-billing", f"{HEADER}\nYou are Claude Code.", "You are Claude Code."),
    ("claude-code-billing", f"{HEADER} cc_workload=cron;\nYou are", "You are"),
    ("claude-code-billing", HEADER, ""),
    (
        "hermes-minute",
        "I help.\n\nConversation started: Sunday, May 17, 2026 03:4{} PM\nModel: m",
        "I help.\n\nConversation started: Sunday, May 17, 2026\nModel: m",
    ),
    (
        "openclaw-run",
        f"You help.\n{RUN.format(':run:e3f4a5b6-0000-4000-8000-00000000000{}')}\n## Tools",
        f"You help.\n{RUN.format('')}\n## Tools",
    ),
]
"""By the name of a nonce, texts as its thread has them, with a number to fill in, and the texts without it."""
SOUND = [
    "The header x-anthropic-billing-header: is for bills.",
    "Conversation started: Sunday, May 17, 2026\nat 03:42 PM",
    RUN.format(""),
    "Runtime: agent=main | session=agent:main:main | host=h:run:1",
]


@pytest.mark.parametrize(("name", "text", "without"), FORMS)
def test_a_form_of_a_thread_is_removed_exactly(name: str, text: str, without: str) -> None:
    assert strip(text.format(1), NONCES) == (without, [name])


@pytest.mark.parametrize("text", SOUND)
def test_what_only_resembles_one_stays(text: str) -> None:
    assert strip(text, NONCES) == (text, [])


def log_of(path: Path, name: str) -> Path:
    """Three turns of a conversation whose nonce is another in each; Claude Code sends it as a block of its own."""
    text = next(text for known, text, _ in FORMS if known == name)
    messages: list[dict[str, Any]] = []
    lines = []
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": f"Question {turn}. {prose(turn)}"}]
        system: Any = f"{text.format(turn)}\n{prose(9)}"
        if name == "claude-code-billing":
            system = [{"type": "text", "text": part} for part in (HEADER.format(turn), prose(9))]
        lines.append({"session_id": "s", "system": system, "messages": messages, "max_tokens": 9})
        messages = [*messages, {"role": "assistant", "content": f"Answer {turn}."}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", NONCES)
def test_explain_and_fix_name_it_and_its_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    log, page, fixed = (log_of(tmp_path / "log.jsonl", name), tmp_path / "page.html", tmp_path / "fixed.jsonl")
    nonce = NONCES[name]
    assert main(["explain", str(log), "--quiet", "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "A known nonce of an agent" in printed
    assert f"{nonce.title}: {nonce.switch}" in printed
    assert html.escape(f"{nonce.title}: {nonce.switch}", quote=False) in page.read_text().replace("&#39;", "'")

    assert main(["fix", str(log), "--quiet", "--out", str(fixed)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"3 of 3 calls: {nonce.title} is removed from {nonce.place}" in printed
    assert nonce.switch in printed
    assert not any(strip(str(call.messages[0]["content"]), NONCES)[1] for one in load(fixed) for call in one.calls())
    for gateway in ("litellm", "nginx"):
        assert main(["fix", str(log), "--gateway", gateway]) == 0
        assert json.dumps([nonce.kept, nonce.removed, nonce.within]) in capsys.readouterr().out
        assert main(["fix", str(fixed), "--gateway", gateway]) == 2
        assert f"none of the known nonces, {', '.join(NONCES)}" in capsys.readouterr().err


def test_the_rule_for_litellm_removes_what_the_server_removes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM calls the hook of a `CustomLogger` with the parsed body of each request."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(log_of(tmp_path / name, name).read_text() for name in NONCES))
    assert main(["fix", str(log), "--gateway", "litellm"]) == 0
    base = ModuleType("litellm.integrations.custom_logger")
    base.CustomLogger = object  # type: ignore[attr-defined]
    for module in ("litellm", "litellm.integrations", base.__name__):
        monkeypatch.setitem(sys.modules, module, base)
    rule: dict[str, Any] = {}
    exec(capsys.readouterr().out, rule)

    def served(data: dict[str, Any]) -> Any:
        return asyncio.run(rule["callback"].async_pre_call_hook(None, None, data, "completion"))

    user = {"role": "user", "content": HEADER.format(1)}
    for text, without in [(text.format(1), without) for _, text, without in FORMS] + [(text, text) for text in SOUND]:
        assert served({"system": text, "messages": [user]}) == {"system": without, "messages": [user]}
        image = {"type": "image_url"}
        parts = [{"type": "text", "text": text}, "More.", image]
        left = [*([{"type": "text", "text": without}] if without else []), "More.", image]
        assert served({"system": parts, "messages": [user]}) == {"system": left, "messages": [user]}
        for key in ("messages", "input"):
            chat = {key: [{"role": "system", "content": text}, user]}
            assert served(chat) == {key: [*([{"role": "system", "content": without}] if without else []), user]}
    assert served({"model": "m", "input": "a"}) == {"model": "m", "input": "a"}
