"""`fix`: what it moves, what it leaves alone, and what it says of the need for splices."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import Call, CallSpec, Message, Session, load

from sglang_pic.cli import main
from sglang_pic.core import CoreConfig
from sglang_pic.explain.rewrite import RULES, Rewriter, _pieces
from tests.helpers.explain_fakes import PATTERNS, assistant, call_of, prose, serve, system, user

Capture = pytest.CaptureFixture[str]


def sessions_of(calls: Iterable[Call]) -> list[Session]:
    """Calls as sessions: each has a pool of its own messages."""
    found: dict[str, tuple[list[Message], list[CallSpec]]] = {}
    for call in calls:
        pool, specs = found.setdefault(call.session_id, ([], []))
        start = len(pool)
        pool += [*call.messages, call.completion]
        specs.append(CallSpec(spans=((start, len(pool) - 1),), completion=len(pool) - 1, tools=call.tools))
    return [Session(session_id=name, source="s", pool=pool, specs=specs) for name, (pool, specs) in found.items()]


def rewritten(sessions: list[Session]) -> tuple[list[Session], Counter[str]]:
    rewriter = Rewriter()
    rewriter.learn(sessions)
    return [rewriter.rewrite(session) for session in sessions], +rewriter.num_changed


def hits(sessions: list[Session]) -> tuple[float, float]:
    """Shares of prompt tokens, behind each session's first call, that a prefix cache hits and that splices add."""
    calls = [call for session in sessions for call in session.calls()]
    outcomes = list(serve(calls, CoreConfig()))[1:]
    total = sum(len(outcome.encoded.tokens) for outcome in outcomes)
    prefix, chunk = (sum(getattr(one, name) for one in outcomes) for name in ("prefix_len", "num_chunk_hit"))
    return prefix / total, chunk / total


MENDED = {
    "billing header": "head",
    "session id in front": "head",
    "clock": "head",
    "counters in a row": "head",
    "memories by score": "head",
    "growing status": "head",
    "history stamped anew": "history",
    "stamps stripped": "history",
    "proxy": "history",
    "alternating tools": "tools",
    "keys of tools": "keys",
}


@pytest.mark.parametrize("name", MENDED)
def test_a_pattern_is_mended_and_needs_no_splices_then(name: str) -> None:
    before = sessions_of(PATTERNS[name][0]())
    after, changed = rewritten(before)
    assert MENDED[name] in changed
    (old, _), (new, spliced) = hits(before), hits(after)
    assert new > old
    assert spliced < 0.03


@pytest.mark.parametrize("name", PATTERNS)
def test_no_text_is_lost(name: str) -> None:
    """Every line of the system prompt stands in the call, or was told in an earlier one; answers stay as they are."""
    before = sessions_of(PATTERNS[name][0]())
    after, _ = rewritten(before)
    for old, new in zip(before, after, strict=True):
        for one, other in zip(old.calls(), new.calls(), strict=True):
            assert other.completion == one.completion
            assert len(other.messages) == len(one.messages)
            shown = json.dumps(other.messages, ensure_ascii=False)
            for line in re.findall(r"[^\n]+", str(one.messages[0]["content"])):
                assert json.dumps(line, ensure_ascii=False)[1:-1].strip() in shown


def test_what_is_sound_is_left_alone() -> None:
    """Also tools whose names and keys are in no order of ours."""
    before = [session for session in load("sample:agents") if session.source != "opendevin_integration"]
    after, changed = rewritten(before)
    assert not changed
    for old, new in zip(before, after, strict=True):
        pairs = zip(old.calls(), new.calls(), strict=True)
        assert all((one.messages, one.tools) == (other.messages, other.tools) for one, other in pairs)


def test_a_system_prompt_that_is_a_clock_leaves_no_message_behind() -> None:
    """Another prompt of another text is no version of it."""
    sessions = [session for session in load("clock:sample:agents") if session.source == "opendevin_integration"]
    after, changed = rewritten(sessions)
    assert set(changed) == {"head"}
    for old, new in zip(sessions, after, strict=True):
        for one, other in zip(old.calls(), new.calls(), strict=True):
            assert [message["role"] for message in one.messages] == ["system", "user"]
            assert [message["role"] for message in other.messages] == ["user"]
            assert str(one.messages[0]["content"]) in str(other.messages[0]["content"])


def test_the_file_has_the_requests_and_the_report_says_what_for(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "fixed.jsonl"
    assert main(["fix", "clock:sample:agents", "--quiet", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"The changes alone lift the prefix cache's hits from 0\.6% to 7\d\.\d%", printed)
    assert f"30 calls: {RULES['head']}" in printed
    calls = [call for session in load(out) for call in session.calls()]
    assert len(calls) == 30
    assert all("Current time" in str(call.messages) for call in calls)
    assert not any("Current time" in str(call.messages[0]["content"]) for call in calls if len(call.messages) > 2)
    assert main(["fix", "sample:agents", "--quiet", "--out", str(out)]) == 2
    assert "exists; name another file, or replace it with --force" in capsys.readouterr().err
    # Without their clocks some prompts are one message, in which a list grows; then nothing is left to mend.
    again = tmp_path / "again.jsonl"
    assert main(["fix", str(out), "--quiet", "--out", str(again)]) == 0
    assert f"11 of 30 calls: {RULES['head']}" in capsys.readouterr().out
    assert main(["fix", str(again), "--quiet"]) == 0
    assert "These rules find nothing that would help" in capsys.readouterr().out


def test_sessions_of_several_files_stay_apart(tmp_path: Path, capsys: Capture) -> None:
    logs = [write(tmp_path / name, growing(lambda _: prose(1, 20))) for name in ("a.jsonl", "b.jsonl")]
    out = tmp_path / "fixed.jsonl"
    assert main(["fix", *map(str, logs), "--quiet", "--out", str(out)]) == 0
    assert [(one.session_id, one.num_calls) for one in load(out)] == [("1-s", 4), ("2-s", 4)]
    capsys.readouterr()
    assert main(["fix", str(logs[0]), "--out", str(tmp_path / "x"), "--gateway", "nginx"]) == 2
    assert "--gateway prints a rule and writes no requests" in capsys.readouterr().err


def test_a_list_that_grows_in_prompts_of_one_message_moves_to_their_end() -> None:
    """The rest of the message is a prefix hit then, and so is the list up to its new entry."""
    rules, end = "Rules: " + prose(1), "Answer with one action. " + prose(2)
    prompts = [
        f"{rules}\n\n{json.dumps([{'step': n, 'seen': prose(10 + n)} for n in range(1, steps)])}\n\n{end}"
        for steps in range(2, 6)
    ]
    calls = [call_of([{"role": "user", "content": text}], index=index) for index, text in enumerate(prompts)]
    before = sessions_of(calls)
    after, changed = rewritten(before)
    assert changed == {"head": 4}
    assert hits(after)[0] > hits(before)[0]
    for old, call in zip(prompts, after[0].calls(), strict=True):
        new = str(call.messages[0]["content"])
        assert sorted(filter(None, new.splitlines())) == sorted(filter(None, old.splitlines())), "lines stay whole"
        assert new.endswith("]")


def test_who_needs_no_plugin_is_told(tmp_path: Path, capsys: Capture) -> None:
    messages = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "ok"}]
    lines = [{"messages": [*messages, {"role": "user", "content": f"{n}"}], "session_id": "s"} for n in range(3)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["fix", str(log), "--quiet"]) == 0
    assert "As it is you do not need this plugin" in capsys.readouterr().out


def write(log: Path, calls: list[list[Message]], *, is_one_session: bool = True) -> Path:
    with log.open("w") as file:
        for n, messages in enumerate(calls):
            named = {"session_id": "s" if is_one_session else f"s{n}", "response": assistant(prose(900 + n, 20))}
            file.write(json.dumps({"messages": messages, **named}) + "\n")
    return log


def growing(head: Callable[[int], str], document: Callable[[int], str] = lambda _: "ok?") -> list[list[Message]]:
    calls = []
    for n in range(4):
        history = [user(document(n))]
        for k in range(n):
            history += [assistant(prose(900 + k, 20)), user(prose(50 + k, 60))]
        calls.append([system(head(n)), *history])
    return calls


def fix(log: Path, capsys: Capture) -> tuple[str, list[list[Message]]]:
    out = log.with_name("fixed.jsonl")
    assert main(["fix", str(log), "--quiet", "--out", str(out)]) == 0
    return " ".join(capsys.readouterr().out.split()), [call.messages for one in load(out) for call in one.calls()]


def test_states_stay_with_their_devices(tmp_path: Path, capsys: Capture) -> None:
    def devices(n: int) -> str:
        listed = "".join(f"- name: lamp {k}\n  state: '{n * (k % 3)}'\n" for k in range(9))
        return f"You run a house.\n\nDevices:\n{listed}\n{prose(1, 200)}"

    printed, calls = fix(write(tmp_path / "log.jsonl", growing(devices)), capsys)
    assert "The changes" in printed or "With these changes" in printed
    for n, messages in enumerate(calls):
        assert "state" not in str(messages[0]["content"])
        assert devices(n).split("\n\n")[1] in str(messages[-1]["content"])


@pytest.mark.parametrize("indent", [None, 2])
def test_json_stays_json(indent: int | None, tmp_path: Path, capsys: Capture) -> None:
    def state(n: int) -> str:
        now = {"step": n, "goal": "Sort. Then ship.", "done": [1] * n}
        return f"State:\n{json.dumps(now, indent=indent)}\n{prose(1, 200)}"

    calls = growing(state)
    for messages in calls:
        messages[-1] = {"role": "tool", "content": json.dumps({"result": prose(7, 9)})}
    _, rewritten = fix(write(tmp_path / "log.jsonl", calls), capsys)
    for n, messages in enumerate(rewritten):
        first, added = messages[-1]["content"]
        assert json.loads(first["text"]) == {"result": prose(7, 9)}
        assert json.loads(added["text"].removeprefix("State:"))["step"] == n


def test_what_gets_worse_stays_as_it_was(tmp_path: Path, capsys: Capture) -> None:
    """Examples chosen anew: a prefix has some of them, and moved to the end there would be none."""
    examples = [f"Q: {prose(20 + k, 90)}\nA: {prose(40 + k, 20)}" for k in range(7)]
    chosen = [[2, 0, 3, 1], [2, 0, 1, 4], [2, 0, 5, 6], [2, 0, 5, 1]]
    heads = [system("\n".join([prose(1, 60), *(examples[k] for k in some)])) for some in chosen]
    calls = [[head, user(prose(60 + n, 9))] for n, head in enumerate(heads)]
    printed, rewritten = fix(write(tmp_path / "log.jsonl", calls, is_one_session=False), capsys)
    assert rewritten == calls
    assert "left as recorded" in printed
    assert "do not need this plugin" not in printed, "the boldest preset would splice the examples"


def test_results_of_parallel_calls_keep_their_order(tmp_path: Path, capsys: Capture) -> None:
    made = [{"id": f"c{k}", "type": "function", "function": {"name": "read", "arguments": "{}"}} for k in range(3)]
    asked: Message = {"role": "assistant", "content": "", "tool_calls": made}
    results: list[Message] = [{"role": "tool", "tool_call_id": f"c{k}", "content": prose(70 + k, 60)} for k in range(3)]
    head: list[Message] = [system(prose(1, 60)), user("look"), asked]
    calls = [[*head, results[2], results[0], results[1]], [*head, *results, assistant("ok"), user("and?")]]
    printed, rewritten = fix(write(tmp_path / "log.jsonl", calls), capsys)
    assert "1 of 2 calls: results of parallel tool calls keep" in printed
    assert [message["tool_call_id"] for message in rewritten[1][3:6]] == ["c2", "c0", "c1"]


def test_several_stamps_of_a_message_are_sent_as_first(tmp_path: Path, capsys: Capture) -> None:
    calls = growing(
        lambda _: prose(1, 20), lambda n: f'<doc at="2026-06-06T14:0{n}:09Z" request="{n}d18f{n}9c">\n{prose(2, 200)}'
    )
    printed, rewritten = fix(write(tmp_path / "log.jsonl", calls), capsys)
    assert re.search(r"from \d\.\d% to [5-9]\d|With these changes", printed)
    assert {str(messages[1]["content"]) for messages in rewritten} == {str(calls[0][1]["content"])}


@given(st.lists(st.sampled_from(["- a", "  b: 1", "{", '  "k": 2', "}", "Env:", "</x>", "<x>", "", "One. Two. " * 30])))
def test_pieces_are_the_text(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "".join(_pieces(text)) == text


@pytest.mark.parametrize("verb", ["explain", "fix"])
def test_a_log_is_never_replaced(verb: str, tmp_path: Path, capsys: Capture) -> None:
    log = write(tmp_path / "log.jsonl", growing(lambda n: f"It is 10:0{n}. {prose(1, 60)}"))
    text = log.read_text()
    for file in (str(log), f"clock:{log}", str(tmp_path)):
        assert main([verb, file, "--out", str(log), "--force", "--quiet"]) == 2
        assert "would replace a log that is read" in capsys.readouterr().err
    assert log.read_text() == text
    page = tmp_path / "page.html"
    page.write_text("old")
    assert main([verb, str(tmp_path), "--out", str(page), "--force", "--quiet"]) == 0
