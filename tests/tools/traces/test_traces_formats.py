"""Loading traces: recorded forms, request logs, files and folders, what is refused; a clock in front; the samples."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pic_traces
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import Call, CallSpec, Message, Session, limit, lines, load
from pic_traces.clock import set_clocks
from pic_traces.encode import load_encoder
from pic_traces.errors import TraceError
from pic_traces.logs import Passed

from tests.helpers.files import messages, request, words, write

MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u0"},
    {"role": "assistant", "content": "a0", "refusal": None},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
]

GOOD = {"session_id": "x", "messages": MESSAGES, "turns": [2, 4]}


def texts(*calls: Call) -> list[object]:
    return [message["content"] for call in calls for message in call.messages]


def test_append_only_sessions(tmp_path: Path) -> None:
    (session,) = load(write(tmp_path / "t.jsonl", {**GOOD, "tools": [{"a": 1}]}))
    first, second = session.calls()
    assert texts(first) == ["s", "u0"]
    assert first.completion == MESSAGES[2]
    assert texts(second) == ["s", "u0", "a0", "u1"]
    assert second.completion == MESSAGES[4]
    assert (second.session_id, second.index, second.tools, second.agent) == ("x", 1, [{"a": 1}], None)


def test_prompts_with_ranges_from_gzip(tmp_path: Path) -> None:
    prompts = {"turns": [4, 2], "prompts": [[0, [2, 4]], [[0, 1], 1]], "agents": ["planner", None]}
    packed = write(tmp_path / "t.gz", "", {**GOOD, **prompts, "note": "unknown keys are ignored"}, "")
    (session,) = load(packed.rename(tmp_path / "no_ending_needed"))
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
    chat = {"choices": [{"message": {"role": "assistant", "content": "three"}}]}
    path = write(
        tmp_path / "log.jsonl",
        request("1", session_id="s", response="one", temperature=0.7),
        request("2", completion={"role": "assistant", "content": "two"}),
        {"custom_id": "c", "body": request("3", metadata={"session_id": "s"}), "response": {"body": chat}},
        {"request": request("4", user="ann", tools=[{"t": 1}], tool_choice="none"), "response": chat},
        request("5", user="ann"),
    )
    sessions = list(load(path))
    assert [session.session_id for session in sessions] == ["s", "line-000002", "user-ann"]
    calls = [call for session in sessions for call in session.calls()]
    assert [texts(call) for call in calls] == [["1"], ["3"], ["2"], ["4"], ["5"]]
    assert [call.completion and call.completion["content"] for call in calls] == ["one", "three", "two", "three", None]
    assert (calls[3].tools, calls[3].options) == ([{"t": 1}], {"tool_choice": "none"})


def test_limits_cut_sessions_and_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, GOOD)
    assert [s.num_calls for s in limit(load(path))] == [2, 2, 2]
    assert [s.num_calls for s in limit(load(path), num_sessions=2)] == [2, 2]
    assert [s.num_calls for s in limit(load(path), num_calls=3)] == [2, 1]
    assert [s.num_calls for s in limit(load(path), num_calls=2)] == [2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([GOOD, '{"session_id": "x",'], r"t\.jsonl:2: bad JSON; a trace is JSONL"),
        ([GOOD, {"messages": MESSAGES, "turns": [2]}], r"t\.jsonl:2: .*missing required field `session_id`"),
        ([GOOD, {**GOOD, "turns": [5]}], r"t\.jsonl:2: turns\[0\] is 5; messages has 5 entries, so 0 to 4 is allowed"),
        ([GOOD, {**GOOD, "turns": [0]}], r"t\.jsonl:2: call 0 was sent no messages: turns\[0\] is 0"),
        ([GOOD, {**GOOD, "prompts": [[0]]}], r"t\.jsonl:2: prompts has 1 entries but turns has 2"),
        ([GOOD, {**GOOD, "prompts": [[0], [[3, 6]]]}], r"t\.jsonl:2: prompts\[1\] has \(3, 6\); .*within \[0, 5\)"),
        ([GOOD, {**GOOD, "messages": [{"content": "x"}]}], r"t\.jsonl:2: messages\[0\] has role None"),
        ([request(""), {"x": 1}], r"t\.jsonl:2: unknown trace format: its keys are x"),
        ([request("", response=3)], r"t\.jsonl:1: the recorded answer is 3; a string"),
    ],
)
def test_errors_name_file_line_and_fault(tmp_path: Path, values: list[object], message: str) -> None:
    """Where all lines are to be read; otherwise the bad one is passed over, and named once."""
    path = write(tmp_path / "t.jsonl", *values)
    with pytest.raises(TraceError, match=message):
        list(load(path, Passed(is_strict=True)))
    if len(values) > 1:
        passed = Passed()
        assert len(list(load(path, passed))) == 1
        assert re.search(message.replace(r"t\.jsonl:2: ", ""), passed.summary())
        assert passed.summary().startswith("passed over 1 line: 1 ")


@pytest.mark.parametrize(
    ("values", "num_read", "message"),
    [
        (['{"messages": NaN}', request("1"), request("2")], 2, r"1 bad JSON; .* \(first .*:1\)"),
        (['{"messages": [{"role"', request("1"), request("2")], 2, r"1 bad JSON; .* \(first .*:1\)"),
        ([[request("1"), None, request("2"), "x"]], 2, r"1 NoneType instead of .*: item 2\).*1 str instead"),
        ([[request("1")], [request("2")], [request("3")]], 1, r"1 2 more lines behind a list; a file is JSONL"),
    ],
)
def test_what_is_damaged_is_passed_over_alone_or_says_how_much_is_lost(
    tmp_path: Path, values: list[object], num_read: int, message: str
) -> None:
    passed = Passed()
    assert len(list(load(write(tmp_path / "t.jsonl", *values), passed))) == num_read
    assert re.search(message, passed.summary())


def test_files_that_are_refused_at_once_and_one_that_is_cut_off(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.jsonl': no such file; a path, - for stdin, sample:NAME"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="sample:nothing: no such sample; sample:agents, sample:opendevin are there"):
        load("sample:nothing")
    with pytest.raises(TraceError, match="empty: no sessions: the file has no lines"):
        load(write(tmp_path / "empty", ""))
    with pytest.raises(TraceError, match=r"odd:1: unknown trace format: its keys are x; expected"):
        load(write(tmp_path / "odd", {"x": "hello"}))
    cut = write(tmp_path / "logs" / "cut.json.gz", *[GOOD] * 200)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    for path in (cut, cut.parent):
        with pytest.raises(TraceError, match=r"cut\.json\.gz.*cannot be read"):
            list(load(path))


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz"])
def test_what_unpacks_to_too_much_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(lines, "_MAX_JSON_BYTES", 1 << 20)
    path = write(tmp_path / name, {**GOOD, "note": "x" * (1 << 20)})
    with pytest.raises(TraceError, match=rf"{name}.*more than 1 MiB.*, unpacked; (split|write)"):
        list(load(path))


def test_a_folder_is_one_log_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", request("3", user="ann"), request("4", user="ann"))
    write(tmp_path / "a" / "2.json", request("2", session_id="s", response="two"), indent=2)
    write(tmp_path / "a" / "1.json.gz", [request("1"), request("1b", session_id="s")])
    write(tmp_path / "c.log.2026-11-25_22", request("6", user="bob"))
    write(tmp_path / "c.jsonl.gz", "", request("5", session_id="s"), request("6"))
    write(tmp_path / "d.json", request("7"), request("8"))
    write(tmp_path / "empty.json", " ")
    write(tmp_path / "notes.txt", "no log")
    write(tmp_path / ".hidden" / "x.jsonl", "no log either")
    sessions = list(load(tmp_path))
    assert [(session.session_id, texts(*session.calls())) for session in sessions] == [
        ("a/1.json.gz-000001", ["1"]),
        ("s", ["1b", "2", "5"]),
        ("user-ann", ["3", "4"]),
        ("c.jsonl.gz-000003", ["6"]),
        ("user-bob", ["6"]),
        ("d.json-000001", ["7"]),
        ("d.json-000002", ["8"]),
    ]
    assert {session.source for session in sessions} == {tmp_path.name}
    answers = [call.completion for call in sessions[1].calls()]
    assert answers == [None, {"role": "assistant", "content": "two"}, None]
    write(tmp_path / "of" / "1.jsonl", GOOD)
    write(tmp_path / "of" / "2.json", [{**GOOD, "session_id": "q"}] * 2, indent=1)
    assert [session.session_id for session in load(str(tmp_path / "of"))] == ["x", "q", "q#2"], "recorded sessions, too"


def test_equal_messages_of_a_log_are_held_once(tmp_path: Path) -> None:
    """Requests repeat their history; a log of them must not take the memory of all prompts."""
    history: list[Any] = [{"role": "user", "content": f"text {number}"} for number in range(3)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [{"messages": history[:count], "tools": tools, "session_id": "s"} for count in (1, 2, 3)]
    (session,) = load(write(tmp_path / "log.jsonl", *lines))
    calls = list(session.calls())
    assert [len(call.messages) for call in calls] == [1, 2, 3]
    assert len({id(message) for call in calls for message in call.messages}) == 3
    assert len({id(call.tools) for call in calls}) == 1


def test_folders_without_sessions_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    with pytest.raises(TraceError, match=r"log: no trace in this folder; files \*\.jsonl, .*\*\.log, .*\.gz are read"):
        load(folder)
    write(folder / "0.json", "")
    with pytest.raises(TraceError, match=r"log: no sessions: its 1 files are empty, .*0\.json the first"):
        load(folder)
    write(folder / "1.json", request("1"))
    assert len(list(load(folder))) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"learning_rate": 1}], r"unknown trace format: its keys are learning_rate.* \(first .*2\.json\)"),
        (['{\n"messages": ['], r"bad JSON: .*; a file is JSONL, .* \(first .*2\.json\)"),
        ([request("2"), "{"], r"bad JSON; .* \(first .*2\.json:2\)"),
        ([[request("2"), 7]], r"int instead of a JSON object; .* \(first .*2\.json: item 2\)"),
    ],
)
def test_what_is_strange_in_a_folder_is_passed_over_and_named(
    tmp_path: Path, values: list[object], message: str
) -> None:
    write(tmp_path / "1.json", request("1"))
    write(tmp_path / "2.json", *values)
    write(tmp_path / "3.json", GOOD)
    passed = Passed()
    names = [session.session_id for session in load(tmp_path, passed)]
    assert {"1.json-000001", "x"} <= set(names)
    assert re.search(message, passed.summary())
    with pytest.raises(TraceError, match=r"2\.json"):
        list(load(tmp_path, Passed(is_strict=True)))


def test_the_sample_is_what_its_readme_says() -> None:
    sessions = list(load("sample:opendevin"))
    agents = "BrowsingAgent CodeActAgent CodeActSWEAgent DelegatorAgent ManagerAgent PlannerAgent"
    assert [session.session_id.split("-")[3] for session in sessions] == agents.split()
    assert sum(session.num_calls for session in sessions) == 36
    assert {session.license for session in sessions} == {"MIT"}
    for session in sessions:
        for call in session.calls():
            assert call.messages
            assert call.completion["role"] == "assistant"


def test_the_demos_sample_keeps_its_rule() -> None:
    sessions = list(load("sample:agents"))
    wanted = {"opendevin_integration": 11, "taubench_airline_gpt4o": 9, "miniswe_deepseek": 10}
    assert [(session.source, session.num_calls) for session in sessions] == [*wanted.items()]
    assert {session.license for session in sessions} == {"MIT"}
    encoder = load_encoder(None)
    for session in sessions:
        lengths = [len(encoder.encode(call).tokens) for call in session.calls()]
        assert len(lengths) >= 8
        # The stand-in counts up to 15 % more than the tokenizer by which the sessions were chosen.
        assert max(lengths) < 1.15 * 4_500
        assert sum(lengths) < 1.15 * 40_000


def test_licences_travel_with_the_samples() -> None:
    folder = Path(pic_traces.__file__).parent / "data"
    readme = "".join((folder / name).read_text() for name in ("README.md", "LICENSES.txt"))
    for project in ("OpenDevin/OpenDevin", "sierra-research/tau-bench", "SWE-agent/mini-swe-agent", "Django"):
        assert project in readme
    assert "Permission is hereby granted" in readme
    assert "Redistribution and use in source and binary forms" in readme


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    pool = draw(st.lists(messages, min_size=1, max_size=6))
    places = st.tuples(st.integers(0, len(pool) - 1), st.integers(0, 4))
    spans = places.map(lambda place: (place[0], min(sum(place), len(pool))))
    prompts = st.lists(spans, min_size=1, max_size=3).filter(lambda found: any(start < end for start, end in found))
    specs = [
        CallSpec(spans=tuple(prompt), completion=draw(st.none() | st.integers(0, len(pool) - 1)), agent=draw(words))
        for prompt in draw(st.lists(prompts, max_size=4))
    ]
    return Session(session_id=draw(words), source="s", pool=pool, specs=specs, license="MIT")


def plain(content: object) -> str:
    """A message's text, whichever way it is written."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part["text"]) for part in parts)


def clock_of(call: Call) -> tuple[datetime, list[Message]]:
    """The time that a prompt tells, and the prompt without it."""
    first, *rest = call.messages
    line, _, text = plain(first["content"]).partition("\n\n")
    told = datetime.strptime(line, "Current time: %Y-%m-%d %H:%M:%S (%A).")
    assert f"{told:(%A).}" in line
    return told, [{**first, "content": text}, *rest]


@given(sessions(), st.integers(0, 9))
def test_only_the_first_line_of_the_system_prompt_changes(session: Session, seed: int) -> None:
    (changed,) = set_clocks([session], seed)
    assert changed.pool[: len(session.pool)] == session.pool
    clocks = []
    for before, after in zip(session.calls(), changed.calls(), strict=True):
        told, messages = clock_of(after)
        clocks.append(told)
        assert messages[0]["role"] in ("system", "developer")
        if before.messages[0]["role"] not in ("system", "developer"):
            assert messages.pop(0)["content"] == ""
        else:
            assert messages[0]["content"] == plain(before.messages[0]["content"])
        assert messages[1:] == before.messages[1:]
        rest = attrgetter("completion", "tools", "agent", "options")
        assert rest(after) == rest(before)
    assert all(2 <= (later - sooner).total_seconds() <= 60 for sooner, later in pairwise(clocks))


@given(st.lists(sessions(), min_size=1, max_size=3), st.integers(0, 9))
def test_a_session_has_the_same_clock_wherever_it_stands(found: list[Session], seed: int) -> None:
    together = list(set_clocks(found, seed))
    assert together == [changed for session in found for changed in set_clocks([session], seed)]


def test_every_source_takes_a_clock(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request("hello"))
    for trace in (str(path), str(tmp_path), "sample:opendevin", "gen:sysvar?sessions=2&calls=3"):
        first, again, other = (list(load(f"{clock}{trace}")) for clock in ("clock:", "clock:1@", "clock:2@"))
        assert first == again
        assert [session.num_calls for session in first] == [session.num_calls for session in load(trace)]
        assert clock_of(next(first[0].calls()))[0] != clock_of(next(other[0].calls()))[0]


def test_what_stands_behind_the_clock_is_checked_as_ever() -> None:
    for trace in ("", "3@", "missing.jsonl"):
        with pytest.raises(TraceError, match=r"no such file; .* clock: in front of any"):
            load(f"clock:{trace}")
