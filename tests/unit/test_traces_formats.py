"""Loading traces: both recorded forms, request logs, format detection and error messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import Call, limit, load
from pic_traces.errors import TraceError

MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u0"},
    {"role": "assistant", "content": "a0", "refusal": None},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def texts(call: Call) -> list[object]:
    return [message["content"] for message in call.messages]


def test_append_only_sessions(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"session_id": "x", "messages": MESSAGES, "turns": [2, 4], "tools": [{"a": 1}]})
    (session,) = load(path)
    first, second = session.calls()
    assert texts(first) == ["s", "u0"]
    assert first.completion == MESSAGES[2]
    assert texts(second) == ["s", "u0", "a0", "u1"]
    assert second.completion == MESSAGES[4]
    assert (second.session_id, second.index, second.tools, second.agent) == ("x", 1, [{"a": 1}], None)


def test_prompts_with_ranges_from_gzip(tmp_path: Path) -> None:
    path = tmp_path / "no_ending_needed"
    record = {
        "session_id": "x",
        "messages": MESSAGES,
        "turns": [4, 2],
        "prompts": [[0, [2, 4]], [[0, 1], 1]],
        "agents": ["planner", None],
        "note": "unknown keys are ignored",
    }
    path.write_bytes(gzip.compress(b"\n" + json.dumps(record).encode() + b"\n\n"))
    (session,) = load(path)
    first, second = session.calls()
    assert (texts(first), first.agent) == (["s", "a0", "u1"], "planner")
    assert (texts(second), second.agent) == (["s", "u0"], None)


@given(data=st.data())
def test_prompts_say_what_the_readme_code_says(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any mix of indices and ranges gives the messages that a plain reading of the format gives."""
    pool = [{"role": "user", "content": str(number)} for number in range(6)]
    index = st.integers(0, 5)
    span = st.tuples(index, st.integers(1, 6)).filter(lambda pair: pair[0] < pair[1])
    prompts = data.draw(st.lists(st.lists(st.one_of(index, span), min_size=1), min_size=1, max_size=4))
    record = {"session_id": "x", "messages": pool, "turns": [0] * len(prompts), "prompts": prompts}
    (session,) = load(write(tmp_path_factory.mktemp("t") / "t.jsonl", record))
    for call, entries in zip(session.calls(), prompts, strict=True):
        wanted: list[dict[str, str]] = []
        for entry in entries:
            wanted += [pool[entry]] if isinstance(entry, int) else pool[entry[0] : entry[1]]
        assert call.messages == wanted


def test_request_log_groups_lines(tmp_path: Path) -> None:
    def user(text: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}]}

    chat = {"choices": [{"message": {"role": "assistant", "content": "three"}}]}
    path = write(
        tmp_path / "log.jsonl",
        {**user("1"), "session_id": "s", "response": "one", "temperature": 0.7},
        {**user("2"), "completion": {"role": "assistant", "content": "two"}},
        {"custom_id": "c", "body": {**user("3"), "metadata": {"session_id": "s"}}, "response": {"body": chat}},
        {"request": {**user("4"), "user": "ann", "tools": [{"t": 1}], "tool_choice": "none"}, "response": chat},
        {**user("5"), "user": "ann"},
    )
    sessions = list(load(path))
    assert [session.session_id for session in sessions] == ["s", "line-000002", "user-ann"]
    calls = [call for session in sessions for call in session.calls()]
    assert [texts(call) for call in calls] == [["1"], ["3"], ["2"], ["4"], ["5"]]
    assert [call.completion and call.completion["content"] for call in calls] == ["one", "three", "two", "three", None]
    assert (calls[3].tools, calls[3].options) == ([{"t": 1}], {"tool_choice": "none"})


def test_limits_cut_sessions_and_calls(tmp_path: Path) -> None:
    record = {"session_id": "x", "messages": MESSAGES, "turns": [2, 4]}
    path = write(tmp_path / "t.jsonl", record, record, record)
    assert [s.num_calls for s in limit(load(path))] == [2, 2, 2]
    assert [s.num_calls for s in limit(load(path), num_sessions=2)] == [2, 2]
    assert [s.num_calls for s in limit(load(path), num_calls=3)] == [2, 1]
    assert [s.num_calls for s in limit(load(path), num_calls=2)] == [2]


GOOD = {"session_id": "x", "messages": MESSAGES, "turns": [2, 4]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"session_id": "x",', r"t\.jsonl:2: bad JSON: .*a trace is JSONL"),
        ("[1]", r"t\.jsonl:2: list instead of a JSON object"),
        (json.dumps({"messages": MESSAGES, "turns": [2]}), r"t\.jsonl:2: .*missing required field `session_id`"),
        (
            json.dumps({**GOOD, "turns": [5]}),
            r"t\.jsonl:2: turns\[0\] is 5; messages has 5 entries, so 0 to 4 is allowed",
        ),
        (json.dumps({**GOOD, "turns": [0]}), r"t\.jsonl:2: call 0 was sent no messages: turns\[0\] is 0"),
        (json.dumps({**GOOD, "turns": ["2"]}), r"t\.jsonl:2: not a recorded session: Expected `int`.*turns"),
        (json.dumps({**GOOD, "prompts": [[0]]}), r"t\.jsonl:2: prompts has 1 entries but turns has 2"),
        (json.dumps({**GOOD, "prompts": [[0], [[3, 6]]]}), r"t\.jsonl:2: prompts\[1\] has \(3, 6\); .*within \[0, 5\)"),
        (json.dumps({**GOOD, "prompts": [[-1], [0]]}), r"t\.jsonl:2: prompts\[0\] has -1; "),
        (json.dumps({**GOOD, "agents": []}), r"t\.jsonl:2: agents has 0 entries"),
        (json.dumps({**GOOD, "messages": [{"content": "x"}]}), r"t\.jsonl:2: messages\[0\] has role None"),
    ],
)
def test_errors_name_file_line_and_fault(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(TraceError, match=message):
        list(load(tmp_path / "t.jsonl"))


def test_errors_of_whole_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.jsonl': no such file; a path, sample:NAME or gen:NAME"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="empty: no sessions: the file has no lines"):
        load(tmp_path / "empty")
    with pytest.raises(TraceError, match=r"odd:1: unknown trace format: its keys are prompt; expected"):
        load(write(tmp_path / "odd", {"prompt": "hello"}))
    whole = gzip.compress((json.dumps(GOOD) + "\n").encode() * 200)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut\.gz.*cannot be read"):
        list(load(tmp_path / "cut.gz"))
    with pytest.raises(TraceError, match=r"mixed:2: no chat request: no `messages` among the keys x"):
        list(load(write(tmp_path / "mixed", {"messages": [{"role": "user", "content": ""}]}, {"x": 1})))
    with pytest.raises(TraceError, match=r"empty_request:1: no chat request: messages is \[\]"):
        list(load(write(tmp_path / "empty_request", {"messages": []})))
    with pytest.raises(TraceError, match=r"answer:1: the recorded answer is 3; a string"):
        list(load(write(tmp_path / "answer", {"messages": MESSAGES, "response": 3})))
