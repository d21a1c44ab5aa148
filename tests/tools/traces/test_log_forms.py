"""A log in any widely used form gives the counts that jinja2 and tokenizers give of its session, or says what to do."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import random
import tarfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from pic_traces import load
from pic_traces.custom import custom_reader
from pic_traces.encode import load_encoder
from pic_traces.encode.encoded import Encoder
from pic_traces.errors import OptionError, TraceError
from pic_traces.logs import Passed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_pic.census.simulate import simulate
from sglang_pic.cli import main
from tests.conftest import ROOT

Json = dict[str, Any]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ '<|t|>' + (tool | tojson) + '\\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|c|>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|e|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|t|>", "<|c|>", "<|e|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
START = 1_780_754_400


class Call(NamedTuple):
    """A request and its answer, in OpenAI's form."""

    number: int
    messages: list[Json]
    tools: list[Json]
    answer: Json

    @property
    def body(self) -> Json:
        return {"model": "m", "messages": self.messages, "tools": self.tools}

    @property
    def response(self) -> Json:
        choice = {"index": 0, "message": self.answer, "finish_reason": "stop"}
        return {"id": f"r{self.number}", "object": "chat.completion", "choices": [choice]}

    @property
    def at(self) -> int:
        """Seconds."""
        return START + 60 * self.number

    @property
    def clock(self) -> str:
        return f"2026-06-06T14:{self.number:02}:00Z"


def make_calls(seed: int = 5) -> list[Call]:
    """The session: each call has the history of the one before, a call of a tool and its result."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("tor", "bel", "mir", "sol", "ul") for b in ("vak", "nen", "rit", "dor")]

    def text(num: int) -> str:
        return " ".join(rng.choice(words) for _ in range(num)) + '. "Oui", dit-il: été,\n' + rng.choice(words)

    def tool(name: str) -> Json:
        schema = {"type": "object", "properties": {"path": {"type": "string", "description": text(9)}}}
        return {"type": "function", "function": {"name": name, "description": text(20), "parameters": schema}}

    tools = [tool("read_file"), tool("list_files")]
    messages: list[Json] = [{"role": "system", "content": text(60)}, {"role": "user", "content": text(40)}]
    calls = []
    for number in range(3):
        made = {"name": "read_file", "arguments": json.dumps({"path": f"src/{rng.choice(words)}.py"})}
        tool_calls = [{"id": f"call_{number}", "type": "function", "function": made}]
        answer = {"role": "assistant", "content": text(12), "tool_calls": tool_calls}
        calls.append(Call(number, deepcopy(messages), tools, answer))
        messages += [answer, {"role": "tool", "tool_call_id": f"call_{number}", "content": text(50)}]
    return calls


def write_model(folder: Path, calls: Sequence[Call]) -> Path:
    """A folder with a small tokenizer, trained on the session, and the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(call.body, ensure_ascii=False) for call in calls], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|e|>"}))
    return folder


def right(folder: Path, calls: Sequence[Call], *, answers: bool = True) -> list[tuple[int, int]]:
    """Prompt tokens and prefix hits of each call, against all earlier prompts and their answers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE)

    def ids(messages: list[Json], tools: list[Json], *, is_prompt: bool) -> list[int]:
        parsed = deepcopy(messages)
        for message in parsed:
            for made in message.get("tool_calls") or []:
                made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        text = template.render(messages=parsed, tools=tools, add_generation_prompt=is_prompt)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    kept: list[list[int]] = []
    counts = []
    for call in calls:
        prompt = ids(call.messages, call.tools, is_prompt=True)
        hit = max((_shared(prompt, path) for path in kept), default=0)
        counts.append((len(prompt), hit))
        kept.append(ids([*call.messages, call.answer], call.tools, is_prompt=False) if answers else prompt)
    return counts


def _shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Form(NamedTuple):
    """A file in `tests/tools/traces/forms` with the session of `make_calls`, and what its form leaves out of it:
    `tools`, `system`, `calls` (of tools), `answers`."""

    name: str
    lacks: tuple[str, ...] = ()

    def seen(self, calls: Sequence[Call]) -> list[Call]:
        """The calls without what the form leaves out."""
        seen = []
        for call in calls:
            messages = deepcopy(call.messages)
            if "system" in self.lacks:
                messages = messages[1:]
            if "calls" in self.lacks:
                messages = [{"role": one["role"], "content": one["content"]} for one in messages]
            tools = [] if "tools" in self.lacks else call.tools
            answer = {**call.answer, "tool_calls": []} if "calls" in self.lacks else call.answer
            seen.append(Call(call.number, messages, tools, answer))
        return seen


FOLDER = Path(__file__).with_name("forms")
LACKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pi.jsonl", "goose.jsonl", "opencode.json"), ("system", "tools")),
    **dict.fromkeys(("useful_chat.jsonl", "batches.jsonl"), ("tools", "answers")),
}
"""`useful_chat` has bodies of the AI SDK's `useChat`, `batches` those of Anthropic's batches."""
FORMS = [Form(path.name, LACKS.get(path.name, ())) for path in sorted(FOLDER.iterdir())]
"""`doubled_spans` has two instrumentations at once, `gateway_twice` each call when it came and when it was answered,
`kubernetes` lines that containerd has cut."""

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


def test_a_call_that_the_template_refuses_is_left_out_and_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server answers that call with an error, and all others."""
    broken = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": None}]}
    refused = logged(CALLS[1]) | {"request": {"messages": [*CALLS[1].messages, broken]}}
    log = write_lines(tmp_path / "log.jsonl", logged(CALLS[0]), refused, logged(CALLS[2]))
    arguments = [str(log), "--quiet", "--tokenizer", str(model)]
    for verb, *more in (["census"], ["explain", "--out", str(tmp_path / "page.html"), "--force"], ["fix"]):
        assert main([verb, *arguments, *more]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "passed over 1 line: 1 the chat template of" in out
        assert "refuses its messages" in out
        assert main([verb, *arguments, *more, "--strict"]) == 2
        assert "session 's', call 1: the chat template of" in capsys.readouterr().err
    assert main(["census", str(write_lines(log, refused)), *arguments[1:]]) == 2
    assert "refuses its messages" in capsys.readouterr().err


def test_lines_that_docker_has_cut_are_joined(encoder: Encoder, tmp_path: Path) -> None:
    """At 16 KiB."""
    rows = []
    for call in CALLS:
        text = json.dumps({"pad": "x" * 40_000, **logged(call)}) + "\n"
        pieces = [text[at : at + 16_384] for at in range(0, len(text), 16_384)]
        rows += [{"log": piece, "stream": "stdout", "time": call.clock} for piece in pieces]
    assert [tokens for tokens, _ in counted(write_lines(tmp_path / "docker.log", *rows), encoder)] == [336, 445, 553]


def test_items_of_a_list_are_calls_of_their_own_and_a_second_list_is_named(tmp_path: Path) -> None:
    """Those of Loki are pairs of a time and a line, which may be nothing but JSON; `spans` may repeat `traces`."""
    bodies = [call.body for call in CALLS]
    pairs = [[f"{call.at}000000000", json.dumps(call.body)] for call in CALLS]
    path = write_lines(
        tmp_path / "log.jsonl",
        {"traces": bodies[:2], "spans": bodies[1:2]},
        {"logEvents": [{"timestamp": CALLS[2].at, "message": json.dumps(bodies[2])}]},
        {"data": {"result": [{"stream": {}, "values": pairs}]}},
    )
    passed = Passed()
    sessions = list(load(path, passed))
    assert [session.num_calls for session in sessions] == [1] * 6
    assert [session.session_id for session in sessions[1:4]] == [
        "line-000001-2", "line-000002-1", "line-000003-1-1",
    ]  # fmt: skip
    assert "passed over 1 line: 1 `spans` is a second list of records" in (passed.summary() or "")


@pytest.mark.parametrize("name", ["elapsed_time", "response_time", "duration", "inference_time"])
def test_a_duration_is_no_time(name: str, encoder: Encoder, tmp_path: Path) -> None:
    """In nanoseconds it may look like one; another name of a time comes before `..._time`."""
    times: list[Json] = [{name: 900_000_000 - call.number * 10**8, "timestamp": call.clock} for call in CALLS]
    for left_out in ({"timestamp"}, set()) if name != "inference_time" else (set(),):
        rows = [
            logged(call, **{key: value for key, value in one.items() if key not in left_out})
            for call, one in zip(CALLS, times, strict=True)
        ]
        assert [tokens for tokens, _ in counted(write_lines(tmp_path / "log.jsonl", *rows), encoder)] == [336, 445, 553]


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


SHARED = ROOT.parent / "shared"
"""Public files and others' inputs, which are not in the repository; without them these tests are skipped."""

NO_TOOLS, WITH_CLOCK, APPENDED = 1507, (3064, 42), (3065, 1989)
INPUTS: dict[str, tuple[int, int] | str] = {
    # Prompt tokens and prefix hits of all calls, or what the error says.
    "cases5/files/base.jsonl": WITH_CLOCK,
    "cases5/files/append_only.jsonl": APPENDED,
    "cases5/files/openinference_contents_no_usage.json": (NO_TOOLS, 42),
    "cases5/files/openllmetry_tools_no_usage.json": WITH_CLOCK,
    "cases5/files/ai_sdk_ui_messages.jsonl": (1227, 648),
    "cases5/files/ai_sdk_model_messages.jsonl": (1436, 719),
    # Bodies without answers: what a model wrote is no hit of the next prompt.
    "cases5/files/bedrock_converse_bodies.jsonl": (3065, 1805),
    "cases5/files/errors_between.jsonl": APPENDED,
    "cases5/files/base.tar.gz": "a tar archive",
    "cases5/files/bedrock_converse_log.jsonl": WITH_CLOCK,
    "cases5/files/opik_spans.jsonl": WITH_CLOCK,
    "cases5/files/vercel_ai_sdk.json": WITH_CLOCK,
    "cases5/files/otel_span_events_old.json": (1331, 42),
    "cases5/files/otel_logs.json": (NO_TOOLS, 42),
    "cases5/files/prompt_as_messages.jsonl": (1436, 903),
    "cases5/files/gemini_session.json": (607, 447),
    "cases5/files/sgl_docker_json.log": WITH_CLOCK,
    "cases5/files/sgl_small.log": WITH_CLOCK,
    "cases5/files/message_field_string.jsonl": (3065, 1805),
    "cases5/files/bigquery_rows.jsonl": APPENDED,
    "cases5/files/langsmith_openai_wrapper.jsonl": WITH_CLOCK,
    "cases5/files/json_in_text.log": (3065, 1805),
    "cases5/files/llamacpp_verbose.log": WITH_CLOCK,
    "cases5/files/utf16.jsonl": "UTF-16 text",
    "cases5/files/stream_json.jsonl": (1051, 664),
    "cases5/files/atif_trajectory.json": (3064, 2006),
    "cases5/files/gemini_bodies.jsonl": WITH_CLOCK,
    "cases5/files/bailian.jsonl": "a serving trace",
    "cases5/files/own_export.mooncake.jsonl": "a serving trace",
    "cases5/files/rotated": (5389, 2199),
    "cases5/cases/trim_in_order.jsonl": (5389, 2387),
    "cases5/cases/trim_newest_first.jsonl": (5389, 2387),
    "files/completions_body.jsonl": "/v1/completions",
    "files/generate_body.jsonl": "SGLang's /generate",
    "files/inspect_dedup.eval": "a zip archive",
    "files/langfuse_autogen-2025-06-06.json": "a Langfuse export whose generations have no messages",
    "files/otel_openagenttraces.json": "spans without messages",
    "files/sharegpt.json": "a ShareGPT data set",
    "files/azure_head.csv": "a table of lengths and times",
    "files/burstgpt_head.csv": "a table of lengths and times",
    "files/sglang_json3.log": (23378, 5167),
    "files/sglang_text3.log": (23378, 5167),
    "files/litellm_spend_store_prompts.jsonl": (14125, 2562),
    "files/litellm_standard_payload.jsonl": (14125, 2562),
    "files/miniswe_v2_shape.traj.json": (17616, 15757),
    "files/sweagent.traj": (56811, 27591),
    "files/vcr_responses.yaml": (1407, 1202),
    "files/vcr_pydantic_multi.yaml": (674, 357),
    "files/codex_rollout.jsonl": (100, 55),
    "files/claudecode_representative.jsonl": (1747, 1606),
}


@pytest.fixture(scope="module")
def shared_encoder() -> Encoder:
    if not SHARED.is_dir():
        pytest.skip("no shared inputs")
    return load_encoder(str(SHARED / "cases5/qwenlike"))


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_others_are_counted_or_named(name: str, shared_encoder: Encoder) -> None:
    expected = INPUTS[name]
    if isinstance(expected, str):
        with pytest.raises(TraceError, match=expected):
            list(load(SHARED / name))
        return
    found = counted(SHARED / name, shared_encoder)
    assert (sum(tokens for tokens, _ in found), sum(hit for _, hit in found)) == expected
