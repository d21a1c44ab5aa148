"""A log in any widely used form gives the counts that jinja2 and tokenizers give of its session, or says what to do."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pic_traces import load
from pic_traces.custom import custom_reader
from pic_traces.encode import load_encoder
from pic_traces.encode.encoded import Encoder
from pic_traces.errors import OptionError, TraceError
from pic_traces.logs import Passed

from sglang_pic.census.simulate import simulate
from sglang_pic.cli import main
from tests.conftest import ROOT
from tests.helpers.log_forms import FOLDER, FORMS, Call, Form, make_calls, right, write_model

CALLS = make_calls()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", CALLS)


@pytest.fixture(scope="module")
def encoder(model: Path) -> Encoder:
    return load_encoder(str(model))


def counted(path: Path, encoder: Encoder, passed: Passed | None = None) -> list[tuple[int, int]]:
    """Prompt tokens and prefix hits of each call of a log."""
    sessions = list(load(path, passed or Passed()))
    return [(len(one.encoded.tokens), one.prefix_len) for one in simulate([("log", sessions)], encoder)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_counted_as_its_session(form: Form, model: Path, encoder: Encoder) -> None:
    passed = Passed()
    found = counted(FOLDER / form.name, encoder, passed)
    expected = right(model, form.seen(CALLS), answers="answers" not in form.lacks)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    # A turn's end is kept without the line end behind it.
    assert all(abs(hit - other) <= 2 for (_, hit), (_, other) in zip(found, expected, strict=True)), (found, expected)
    assert "not read" not in (passed.summary() or "")


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def logged(call: Call, **fields: Any) -> dict[str, Any]:
    return {"session_id": "s", "request": call.body, "response": call.response, **fields}


def test_lines_that_docker_has_cut_are_joined(encoder: Encoder, tmp_path: Path) -> None:
    """At 16 KiB."""
    rows = []
    for call in CALLS:
        text = json.dumps({"pad": "x" * 40_000, **logged(call)}) + "\n"
        pieces = [text[at : at + 16_384] for at in range(0, len(text), 16_384)]
        rows += [{"log": piece, "stream": "stdout", "time": call.clock} for piece in pieces]
    assert [tokens for tokens, _ in counted(write_lines(tmp_path / "docker.log", *rows), encoder)] == [336, 445, 553]


def sglang_events(call: Call) -> list[str]:
    """What `--log-requests-format json` writes of a call: when it arrived, and when it was answered."""
    clock = call.clock.rstrip("Z")
    begin = f"[{clock.replace('T', ' ')}] "
    body = {"timestamp": clock, "event": "request.received.openai", "obj": call.body}
    received = {"timestamp": clock, "event": "request.received", "rid": f"{call.number}", "obj": {}}
    out = {"text": call.answer["content"], "meta_info": {"prompt_tokens": 9}}
    finished = {**received, "event": "request.finished", "out": out}
    return [begin + json.dumps(one) for one in (body, received, finished)]


def test_a_rotated_log_is_read_in_the_order_of_its_times(encoder: Encoder, tmp_path: Path) -> None:
    """By name `server.log` with the newest lines comes first; a call may be answered in the next file."""
    rows = [row for call in CALLS for row in sglang_events(call)]
    whole = tmp_path / "whole.log"
    whole.write_text("\n".join(rows))
    folder = tmp_path / "rotated"
    folder.mkdir()
    for name, part in (("server.log.2", rows[:4]), ("server.log.1", rows[4:5]), ("server.log", rows[5:])):
        (folder / name).write_text("\n".join(part))
    passed = Passed()
    assert counted(folder, encoder, passed) == counted(whole, encoder)
    assert passed.notes == ["calls are in the order of their recorded times"]


def test_without_times_the_order_is_said(encoder: Encoder, tmp_path: Path) -> None:
    for name, call in zip(("a.jsonl.2", "a.jsonl.1", "a.jsonl"), CALLS, strict=True):
        response = {key: value for key, value in call.response.items() if key != "created"}
        write_lines(tmp_path / name, {"session_id": "s", "request": call.body, "response": response})
    passed = Passed()
    assert [tokens for tokens, _ in counted(tmp_path, encoder, passed)] == [336, 445, 553]
    assert passed.notes == [
        "calls are in the order of files (by name, rotated ones first) and lines, because not all have recorded times"
    ]


def test_refused_and_doubled_calls_are_left_out_and_counted(encoder: Encoder, tmp_path: Path) -> None:
    first, second, third = (logged(call, timestamp=call.clock) for call in CALLS)
    error = {**second, "response": {"error": {"message": "slow down", "code": 429}}}
    closed = {**third, "status_code": 499, "response": None}
    passed = Passed()
    path = write_lines(tmp_path / "log.jsonl", first, error, second, second, {**third, "status": 503}, closed)
    assert [tokens for tokens, _ in counted(path, encoder, passed)] == [336, 445, 553]
    assert passed.summary() == (
        "left out 2 calls that were answered with an error (HTTP 4xx or 5xx); "
        "left out 1 call that was recorded before (same messages, same id or time)"
    )
    with pytest.raises(TraceError, match="all 1 calls in it were answered with an error"):
        load(write_lines(tmp_path / "all.jsonl", error))
    # Without ids or times equal calls are calls of their own.
    assert len(counted(write_lines(tmp_path / "equal.jsonl", *[CALLS[0].body] * 3), encoder)) == 3


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"messages": [{"role": "user", "content": "hi", "memo": CALLS[0].messages[0]["content"]}]}, "messages[].memo"),
        ({"messages": [{"role": "user", "content": "hi"}], "tool_list": CALLS[0].tools}, "tool_list[].function"),
        ({"request": {"messages": [{"role": "user", "content": "hi"}]}, "rest": [CALLS[0].body]}, "rest[].messages"),
    ],
)
def test_texts_that_are_left_unread_are_named(line: dict[str, Any], field: str, tmp_path: Path) -> None:
    passed = Passed()
    list(load(write_lines(tmp_path / "log.jsonl", line), passed))
    summary = passed.summary() or ""
    assert "of the text in the requests is in fields that are not read" in summary
    assert f"`{field}" in summary


def test_what_is_cut_or_no_request_is_not_read_as_one(tmp_path: Path) -> None:
    whole = json.dumps(CALLS[1].body)
    for text in (whole[:-40], f"INFO {whole[:-40]}", "INFO {} done", json.dumps({"level": "INFO", "message": "up"})):
        (tmp_path / "log.jsonl").write_text(f"{json.dumps(CALLS[0].body)}\n{text}\n")
        passed = Passed()
        assert sum(session.num_calls for session in load(tmp_path / "log.jsonl", passed)) == 1
        assert "passed over 1 line" in (passed.summary() or "")
    assert "its keys are level, message" in (passed.summary() or "")


def test_packed_files_are_read_and_others_are_named(encoder: Encoder, tmp_path: Path) -> None:
    data = "".join(f"{json.dumps(logged(call))}\n" for call in CALLS).encode()
    for name, packed in (("a.jsonl.xz", lzma.compress(data)), ("a.jsonl.bz2", bz2.compress(data))):
        (tmp_path / name).write_bytes(packed)
        assert [tokens for tokens, _ in counted(tmp_path / name, encoder)] == [336, 445, 553]
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        entry = tarfile.TarInfo("log.jsonl")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    row = {"chat_id": 1, "timestamp": 0.5, "input_length": 999, "output_length": 1, "hash_ids": [1, 2]}
    for content, message in (
        (memory.getvalue(), r"a tar archive.*tar xf"),
        (data.decode().encode("utf-16"), "UTF-16 text .*iconv -f UTF-16"),
        (b"SQLite format 3\x00", "a SQLite database.*--reader"),
        (b'{"input": {"question": "why?"}, "name": "x"}', "an `input` that has no messages of a form that is known"),
        (b'{"choices": [], "object": "chat.completion"}', "an answer without its request"),
        (json.dumps(row).encode(), "a serving trace, of lengths and block ids"),
    ):
        (tmp_path / "log").write_bytes(content)
        with pytest.raises(TraceError, match=message):
            load(tmp_path / "log")


READER = '''
import json


def read(path):
    """Yields the calls of a file, each as a chat request."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield {"session_id": row["chat"], "messages": row["log"], "response": row["answer"]}
'''


def test_a_reader_of_the_users_reads_any_other_form(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the page of formats shows it."""
    path = write_lines(tmp_path / "log", *({"chat": 1, "log": [call.messages], "answer": "x"} for call in CALLS))
    with pytest.raises(TraceError, match="--reader MODULE:FUNCTION reads any other"):
        load(path)
    page = (ROOT / "traces/pic_traces/README.md").read_text()
    assert READER.strip() in page
    (tmp_path / "my_log.py").write_text(
        READER.replace('row["log"]', 'row["log"][0]') + "\ndef bad(path):\n    yield 3\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["census", str(path), "--quiet", "--json", "--reader"]
    assert main([*arguments, "my_log:read"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["calls"] == 3
    assert main([*arguments, "my_log:bad"]) == 2
    assert "--reader='my_log:bad' on" in capsys.readouterr().err
    with pytest.raises(OptionError, match=r"--reader='my_log': .*MODULE:FUNCTION is allowed"):
        custom_reader("my_log")
    with pytest.raises(TraceError, match="unknown trace format"):
        load(path)
