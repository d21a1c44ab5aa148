"""Request logs and recorded sessions as folders of files: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pic_traces import load
from pic_traces.errors import TraceError
from pic_traces.session import Session

RECORDED = {
    "session_id": "r",
    "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
    "turns": [1],
}


def request(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def contents(session: Session) -> list[object]:
    return [message["content"] for call in session.calls() for message in call.messages]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_json(path: Path, value: object, indent: int | None = None) -> Path:
    return write(path, json.dumps(value, indent=indent))


def test_a_folder_is_one_log_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", "\n".join(json.dumps(request(text, user="ann")) for text in ("3", "4")))
    write_json(tmp_path / "a" / "2.json", request("2", session_id="s", response="two"), indent=2)
    write_json(tmp_path / "a" / "1.json.gz", [request("1"), request("1b", session_id="s")])
    write(tmp_path / "c.jsonl.gz", f"\n{json.dumps(request('5', session_id='s'))}\n{json.dumps(request('6'))}")
    write(tmp_path / "d.json", json.dumps(request("7")) + "\n" + json.dumps(request("8")))
    write(tmp_path / "empty.json", " \n")
    write(tmp_path / "notes.txt", "no log")
    write(tmp_path / ".hidden" / "x.jsonl", "no log either")
    sessions = list(load(tmp_path))
    assert [(session.session_id, contents(session)) for session in sessions] == [
        ("a/1.json.gz-000001", ["1"]),
        ("s", ["1b", "2", "5"]),
        ("user-ann", ["3", "4"]),
        ("c.jsonl.gz-000003", ["6"]),
        ("d.json-000001", ["7"]),
        ("d.json-000002", ["8"]),
    ]
    assert {session.source for session in sessions} == {tmp_path.name}
    answers = [call.completion for call in sessions[1].calls()]
    assert answers == [None, {"role": "assistant", "content": "two"}, None]


def test_recorded_sessions_in_a_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "1.jsonl", RECORDED)
    write_json(tmp_path / "2.json", [{**RECORDED, "session_id": "q"}] * 2, indent=1)
    assert [session.session_id for session in load(str(tmp_path))] == ["r", "q", "q"]


def test_one_pretty_printed_file(tmp_path: Path) -> None:
    (session,) = load(write_json(tmp_path / "one.json", request("1"), indent=4))
    assert contents(session) == ["1"]
    assert session.source == "one.json"


def test_equal_messages_of_a_log_are_held_once(tmp_path: Path) -> None:
    """Requests repeat their history; a log of them must not take the memory of all prompts."""
    history: list[Any] = [{"role": "user", "content": f"text {number}"} for number in range(3)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [json.dumps({"messages": history[:count], "tools": tools, "session_id": "s"}) for count in (1, 2, 3)]
    (session,) = load(write(tmp_path / "log.jsonl", "\n".join(lines)))
    calls = list(session.calls())
    assert [len(call.messages) for call in calls] == [1, 2, 3]
    assert len({id(message) for call in calls for message in call.messages}) == 3
    assert len({id(call.tools) for call in calls}) == 1


def test_folders_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    with pytest.raises(TraceError, match=r"log: no trace in this folder; files \*\.jsonl, .*\*\.json\.gz are read"):
        load(folder)
    write(folder / "0.json", "")
    with pytest.raises(TraceError, match=r"log: no sessions: its 1 files are empty, .*0\.json the first"):
        load(folder)
    write_json(folder / "1.json", request("1"))
    assert len(list(load(folder))) == 1

    bad = write_json(folder / "2.json", RECORDED)
    with pytest.raises(TraceError, match=r"2\.json: of recorded sessions .*, but .*1\.json has OpenAI chat requests"):
        list(load(folder))
    write_json(bad, [request("2"), {"learning_rate": 1}])
    with pytest.raises(TraceError, match=r"2\.json: item 2: of an unknown format, but .*keys: learning_rate"):
        list(load(folder))
    write_json(bad, [request("2"), 3])
    with pytest.raises(TraceError, match=r"2\.json: item 2: int instead of a JSON object"):
        list(load(folder))
    write(bad, '{\n"messages": [')
    with pytest.raises(TraceError, match=r"2\.json: bad JSON: .*; a \.json file is one JSON object or a list of them"):
        list(load(folder))
    write(bad, "7")
    with pytest.raises(TraceError, match=r"2\.json: int instead of a JSON object or a list of them"):
        list(load(folder))
    write(bad, json.dumps(request("1")) + "\n{")
    with pytest.raises(TraceError, match=r"2\.json:2: bad JSON: "):
        list(load(folder))
    whole = gzip.compress(json.dumps(request("1" * 1000)).encode())
    (folder / "3.json.gz").write_bytes(whole[:20])
    bad.unlink()
    with pytest.raises(TraceError, match=r"3\.json\.gz: cannot be read"):
        list(load(folder))
