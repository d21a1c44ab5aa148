"""`fix` does no harm: objects and JSON stay whole, what gets worse stays as recorded, and no log is replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import load
from pic_traces.session import Message

from sglang_pic.cli import main
from sglang_pic.explain.rewrite import _pieces
from tests.helpers.explain_fakes import prose
from tests.helpers.explain_patterns import assistant, system, user

Capture = pytest.CaptureFixture[str]


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
