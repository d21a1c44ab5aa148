"""Logs of other tools: each format is read from a small file of its own, or refused by name and with a remedy."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pic_traces import Call, load
from pic_traces.custom import CustomReader
from pic_traces.encode import load_encoder
from pic_traces.errors import TraceError
from pic_traces.formats import READERS, reader
from pic_traces.logs import Passed

from sglang_pic.cli import main
from tests.helpers.files import request, write

LOGS = Path(__file__).parent / "logs"


def calls_of(path: Path | str, passed: Passed | None = None) -> list[Call]:
    return [call for session in load(path, passed or Passed()) for call in session.calls()]


def roles(call: Call) -> str:
    return " ".join(str(message["role"]) for message in call.messages)


@pytest.mark.parametrize(
    ("name", "prompts", "answered", "tokens"),
    [
        ("sglang_json.log", ["user"] * 2, 2, [1150, 1446]),
        ("sglang_text.log", ["user"] * 2, 2, [1150, 1446]),
        ("anthropic.jsonl", ["system user", "system user assistant user"], 2, [1114, 1532]),
        ("responses.jsonl", ["system user", "system user assistant tool"], 2, [124, 2087]),
        ("litellm_spend.jsonl", ["system user", "system user assistant tool"], 2, [1, 1]),
        ("litellm_payload.jsonl", ["system user", "system user assistant tool"], 2, [None, None]),
        ("claude_code.jsonl", ["user", "user assistant user", "user assistant user assistant tool"], 3, [25, 45, 78]),
        ("codex_rollout.jsonl", ["user", "user assistant tool"], 2, [None, None]),
        ("proxy.har", ["system user"], 1, [31]),
        ("vcr.yaml", ["system user", "system user assistant tool", "user", "system user"], 4, [58, 96, 10, 7]),
        ("mini_swe.traj.json", ["system user", "system user assistant user"], 2, [None, None]),
        ("mini_swe_v1.traj.json", ["system user", "system user assistant user"], 2, [None, None]),
        (
            "swe_agent.traj",
            ["system user", "system user assistant tool", "system user" + " assistant tool" * 2],
            3,
            [None] * 3,
        ),
    ],
)
def test_a_format_is_read_from_a_real_file(
    name: str, prompts: list[str], answered: int, tokens: list[int | None]
) -> None:
    found = calls_of(LOGS / name)
    assert [roles(call) for call in found] == prompts
    assert sum(call.completion is not None for call in found) == answered
    assert [call.prompt_tokens for call in found] == tokens
    encoder = load_encoder(None)
    assert all(len(encoder.encode(call).tokens) > 8 for call in found)


def test_every_reader_has_its_file() -> None:
    """Those made by hand below have a format that is public, and no file at hand."""
    by_hand = {"OTel", "OpenHands", "Recorded", "Chat"}
    of_files = {"SGLangLog", "LiteLLM", "ClaudeCode", "Codex", "Trajectory", "Responses", "Har", "Vcr"}
    assert {kind.__name__ for kind in READERS} == by_hand | of_files


def test_exchanges_of_one_conversation_are_one_session() -> None:
    # The second one was answered with 503.
    passed = Passed()
    (first,) = calls_of(LOGS / "proxy.har", passed)
    assert first.completion["content"] == "Four files."
    assert passed.summary() == "left out 1 call that was answered with an error (HTTP 4xx or 5xx)"
    sessions = [call.session_id for call in calls_of(LOGS / "vcr.yaml")]
    assert sessions[0] == sessions[1]
    assert len(set(sessions)) == 3


def test_a_cassette_is_read_one_interaction_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for an interaction, not for the cassette."""
    item = f"- request:\n    body: '{json.dumps(request('word ' * 40))}'\n  response: {{status: {{code: 200}}}}\n"
    path = write(tmp_path / "log.yml", "---\nhttp_interactions:\n" + item * 20 + "recorded_with: VCR 6")
    monkeypatch.setattr("pic_traces.lines._MAX_LINE_BYTES", 1000)
    assert [call.completion for call in calls_of(path)] == [None] * 20
    monkeypatch.setattr("pic_traces.lines._MAX_LINE_BYTES", 100)
    with pytest.raises(TraceError, match="an interaction of more than 0 MiB"):
        calls_of(path)


def test_answers_of_sglang_are_paired_with_their_requests() -> None:
    for name in ("sglang_json.log", "sglang_text.log"):
        first, second = calls_of(LOGS / name)
        assert "add_task" in first.completion["content"] != second.completion["content"]
        assert first.session_id == second.session_id


def test_a_cut_log_of_sglang_is_refused(tmp_path: Path) -> None:
    event = {"timestamp": "t", "event": "request.received.openai"}
    cut = "x" * 1024 + "..." + "x" * 1024
    as_json = json.dumps({**event, "obj": request(cut)})
    body = "{'messages': [{'role': 'user', 'content': 'a' ... 'b'}], 'model': 'm'}"
    for line in (f"[2026-11-25 22:59:06] {as_json}", f"[2026-11-25 22:59:06 TP0] Receive OpenAI: obj={body}"):
        with pytest.raises(TraceError, match=r"log:1: SGLang cut its texts .* --log-requests-level 3"):
            calls_of(write(tmp_path / "log", line))


ANTHROPIC = json.loads((LOGS / "anthropic_blocks.json").read_text())


def test_anthropics_blocks_become_messages(tmp_path: Path) -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "blue"}]}
    usage = {"input_tokens": 3, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 7}
    line = {"url": "/v1/messages", "request": {"body": ANTHROPIC}, "response": {"body": {**answer, "usage": usage}}}
    (call,) = calls_of(write(tmp_path / "log.jsonl", line))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    look = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "\\u00e9"}'}}
    assert call.messages == [
        {"role": "system", "content": "Be good.\nNow."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm", "tool_calls": [look]},
        {"role": "tool", "tool_call_id": "t1", "content": "sky"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, image]},
    ]
    assert [tool["function"]["name"] for tool in call.tools] == ["look"]
    assert (call.completion["content"], call.prompt_tokens) == ("blue", 50)


def test_a_response_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    say = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a0"}]}
    think = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    used = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}
    path = write(
        tmp_path / "log.jsonl",
        {"body": {"input": "u0", "instructions": "s"}, "response": {"id": "r1", "output": [think, say], "usage": used}},
        {"body": {"input": "u1", "previous_response_id": "r1"}, "response": {"id": "r2", "output": []}},
        {"body": {"input": "u2", "previous_response_id": "r9"}},
        {"input": ["embed", "me"], "model": "e"},
    )
    passed = Passed()
    first, second = calls_of(path, passed)
    assert (roles(first), first.prompt_tokens) == ("system user", 9)
    assert [message["content"] for message in second.messages] == ["u0", "a0", "u1"]
    assert second.messages[1]["reasoning_content"] == "hm"
    assert "names a response that is not in the log" in passed.summary()
    assert "/v1/embeddings" in passed.summary()


def test_streams_are_joined(tmp_path: Path) -> None:
    """By hand, after what gateways record of the three APIs."""

    def events(*data: dict[str, Any]) -> str:
        return "".join(f"event: x\ndata: {json.dumps(one)}\n\n" for one in data) + "data: [DONE]\n\n"

    def part(**delta: object) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta}]}

    called = [{"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at"'}}]
    rest = [{"index": 0, "function": {"arguments": ": 1}"}}]
    chat = [part(reasoning_content="h"), part(reasoning_content="m"), part(content="a"), part(content="b")]
    chat += [part(tool_calls=called), part(tool_calls=rest), {"choices": [], "usage": {"prompt_tokens": 7}}]
    blocks = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4}}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "c", "name": "look", "input": {}}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"at": 1}'}},
    ]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ab"}]}
    whole = {"id": "r", "output": [said], "usage": {"input_tokens": 3}}
    path = write(
        tmp_path / "log.jsonl",
        request("u", response=events(*chat)),
        request("u", response=chat),
        {"request": {"body": request("u", system="s")}, "response": {"status": 200, "body_raw": events(*blocks)}},
        {"input": "u", "store": False, "response": {"body": events({"type": "response.completed", "response": whole})}},
    )
    found = calls_of(path)
    answers = [call.completion for call in found]
    assert [answer["content"] for answer in answers] == ["ab"] * 4
    assert [call.prompt_tokens for call in found] == [7, 7, 9, 3]
    assert [answer.get("reasoning_content") for answer in answers] == ["hm", "hm", None, None]
    made = [answer["tool_calls"][0]["function"] for answer in answers[:3]]
    assert made == [{"name": "look", "arguments": '{"at": 1}'}] * 3


def test_of_several_answers_the_first_is_read_and_chunks_of_any_api_are_joined(tmp_path: Path) -> None:
    """A client goes on from the choice with index 0, wherever it stands."""

    def chunk(index: int, text: str) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": {"content": text}}]}

    def gemini(*said: dict[str, Any]) -> dict[str, Any]:
        return {"candidates": [{"content": {"role": "model", "parts": [*said]}}], "usageMetadata": {}}

    two = [chunk(0, "Hello "), chunk(1, "Bon"), chunk(0, "world"), chunk(1, "jour")]
    whole = [{"index": at, "message": {"role": "assistant", "content": text}} for at, text in ((1, "x"), (0, "b"))]
    called = [{"functionCall": {"name": name, "args": {"at": 1}}} for name in ("look", "go")]
    ollama = [{"message": {"role": "assistant", "content": text}, "done": text == "b"} for text in ("a", "b")]
    path = write(
        tmp_path / "log.jsonl",
        request("u", response=two),
        request("u", response={"choices": whole}),
        request("u", response=[{"choices": whole}]),
        request("u", response=[gemini({"text": "a"}), gemini({"text": "b"}, called[0]), gemini(called[1])]),
        request("u", response=ollama),
        request("u", response="\n".join(map(json.dumps, ollama))),
        request("u", response=f"data: {json.dumps({'error': {'message': 'overloaded'}})}\n\ndata: [DONE]\n\n"),
    )
    passed = Passed()
    answers = [call.completion for call in calls_of(path, passed)]
    assert [answer["content"] for answer in answers] == ["Hello world", "b", "b", "ab", "ab", "ab"]
    assert [call["function"]["name"] for call in answers[3]["tool_calls"]] == ["look", "go"]
    assert passed.summary() == "left out 1 call that was answered with an error (HTTP 4xx or 5xx)"


@pytest.mark.parametrize(
    "text",
    [
        '{"status": "failed", "reason": "3 tests broke"}',
        '{"error": "no such file"}',
        '{"status": 500}',
        '{"text": "inner", "date": "2026-06-06 14:00:00", "input_tokens": 7}',
        '{"role": "admin", "output": 5}',
    ],
)
def test_a_text_that_is_json_is_an_answer(text: str, tmp_path: Path) -> None:
    choice = {"message": {"role": "assistant", "content": "x"}}
    recorded = json.dumps({"body": json.dumps({"choices": [choice]})})
    passed = Passed()
    first, second = calls_of(
        write(tmp_path / "log.jsonl", request("u", response=text), request("v", response=recorded)), passed
    )
    assert (first.completion["content"], first.prompt_tokens, second.completion["content"]) == (text, None, "x")
    assert "lines, because not all have recorded times" in passed.notes[0]


def test_responses_are_known_by_what_was_answered_and_found_in_any_order(tmp_path: Path) -> None:
    """An export may have the newest first."""
    said = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]
    lines = [
        {"at": f"2026-06-06T14:0{n}:00Z", "model": "m", "input": f"u{n}", "response": {"id": f"r{n}", "output": said}}
        | ({"previous_response_id": f"r{n - 1}"} if n else {})
        for n in range(3)
    ]
    for path in (write(tmp_path / "a.jsonl", *lines), write(tmp_path / "b.jsonl", *lines[::-1])):
        passed = Passed()
        found = calls_of(path, passed)
        assert [roles(call) for call in found] == ["user", "user assistant user", "user" + " assistant user" * 2]
        assert (passed.summary(), len({call.session_id for call in found})) == (None, 3)


def test_a_line_with_half_a_character_is_passed_over_wherever_it_stands(tmp_path: Path) -> None:
    """Clients cut texts inside an emoji; no server takes that."""
    half, whole = request("cut \ud83d here"), request("\U0001f600")
    begin = "[2026-11-25 22:59:06 TP0] Receive OpenAI: obj="
    for number, values in enumerate(
        (
            [half, whole],
            [[half, whole]],
            [f"INFO {json.dumps(half)}", f"INFO {json.dumps(whole)}"],
            [f"{begin}{half}", f"{begin}{whole}"],
        )
    ):
        passed = Passed()
        (call,) = calls_of(write(tmp_path / f"{number}.log", *values), passed)
        assert call.messages == whole["messages"]
        assert passed.summary().startswith("passed over 1 line")
    passed = Passed()
    one = CustomReader("r", lambda _: [half, whole])
    assert [session.num_calls for session in load(tmp_path / "0.log", passed, one)] == [1]
    assert "passed over 1 line" in passed.summary()


def test_litellm_rows_without_their_prompt_say_what_to_set(tmp_path: Path) -> None:
    row = {"call_type": "acompletion", "messages": {}, "proxy_server_request": "{}"}
    with pytest.raises(TraceError, match="store_prompts_in_spend_logs: true"):
        calls_of(write(tmp_path / "a.jsonl", row))
    cut = {**row, "messages": [{"role": "user", "content": "a ... (litellm_truncated 99 chars) ... b"}]}
    with pytest.raises(TraceError, match="MAX_STRING_LENGTH_PROMPT_IN_DB"):
        calls_of(write(tmp_path / "b.jsonl", cut))


def claude(uuid: str, parent: str | None, kind: str, content: Any, **fields: object) -> dict[str, object]:
    message: dict[str, object] = {"role": kind, "content": content}
    if kind == "assistant":
        message["id"] = fields.pop("id", uuid)
    line = {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message}
    return {**line, **fields}


def test_claude_codes_tree_of_lines(tmp_path: Path) -> None:
    """By hand, after public sessions: blocks of one answer, calls side by side, a compaction, a subagent."""
    use = [{"type": "tool_use", "id": name, "name": "Read", "input": {}} for name in ("t1", "t2")]
    result = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("t1", "t2")]
    path = write(
        tmp_path / "s.jsonl",
        claude("u1", None, "user", "go"),
        claude("a1", "u1", "assistant", [use[0]], id="m1"),
        claude("a2", "a1", "assistant", [use[1]], id="m1"),
        claude("r1", "a1", "user", [result[0]]),
        claude("r2", "a2", "user", [result[1]]),
        claude("a3", "r2", "assistant", [{"type": "text", "text": "done"}]),
        {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None, "sessionId": "s"},
        claude("u2", "c", "user", "a summary", isCompactSummary=True),
        claude("a4", "u2", "assistant", "on"),
        claude("x1", None, "user", "sub", isSidechain=True, agentId="ag"),
        claude("x2", "x1", "assistant", "found", isSidechain=True, agentId="ag"),
        claude("a5", "a4", "assistant", "API Error", isApiErrorMessage=True)
        | {"message": {"role": "assistant", "content": "x", "model": "<synthetic>"}},
    )
    (session,) = load(path)
    found = list(session.calls())
    assert [roles(call) for call in found] == ["user", "user assistant tool tool", "user", "user"]
    assert len(found[0].completion["tool_calls"]) == 2
    assert found[2].messages[0]["content"] == "a summary"
    assert [call.agent for call in found] == [None, None, None, "ag"]


def test_codexs_compaction_and_usage(tmp_path: Path) -> None:
    """By hand, after public rollouts: what the model wrote up to the next input is one call."""

    def item(**payload: object) -> dict[str, object]:
        return {"timestamp": "t", "type": "response_item", "payload": payload}

    def say(role: str, text: str) -> dict[str, object]:
        return item(type="message", role=role, content=[{"type": "input_text", "text": text}])

    count = {"type": "token_count", "info": {"last_token_usage": {"input_tokens": 11, "cached_input_tokens": 4}}}
    path = write(
        tmp_path / "rollout.jsonl",
        {"timestamp": "t", "type": "session_meta", "payload": {"id": "c1", "base_instructions": {"text": "be"}}},
        say("user", "u0"),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "hm"}]),
        item(type="custom_tool_call", name="apply_patch", call_id="p", input="*** Begin"),
        {"timestamp": "t", "type": "event_msg", "payload": count},
        item(type="custom_tool_call_output", call_id="p", output='{"output": "ok"}'),
        say("assistant", "done"),
        {"timestamp": "t", "type": "compacted", "payload": {"message": "so far"}},
        say("user", "u1"),
        say("assistant", "a1"),
    )
    found = calls_of(path)
    assert [roles(call) for call in found] == ["system user", "system user assistant tool", "system user user"]
    assert (found[0].completion["reasoning_content"], found[0].prompt_tokens) == ("hm", 11)
    assert [message["content"] for message in found[2].messages] == ["be", "so far", "u1"]


def test_trajectories_of_tau_bench_and_data_sets(tmp_path: Path) -> None:
    """By hand, after tau-bench's results and chat data sets: each turn of an assistant is a call."""
    turns: list[Any] = [
        {"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    trial = {"task_id": 3, "reward": 1.0, "info": {}, "traj": turns}
    path = write(tmp_path / "r.json", [trial, {"messages": turns}, trial])
    found = calls_of(path)
    assert [roles(call) for call in found] == ["system user", "system user assistant user"] * 3
    assert [call.session_id for call in found[::2]] == ["3", "r.json:item2", "3#2"], "a trial is a session"
    # An answer that was begun by the client is one call.
    (call,) = calls_of(write(tmp_path / "p.jsonl", {"model": "m", "messages": turns}))
    assert len(call.messages) == 5


def attributes(**values: object) -> list[dict[str, object]]:
    return [
        {"key": key, "value": {"stringValue": value if isinstance(value, str) else json.dumps(value)}}
        for key, value in values.items()
    ]


def test_spans_of_models(tmp_path: Path) -> None:
    """By hand, after the semantic conventions, OpenLLMetry and OpenInference; no file at hand has any."""
    text = {"type": "text", "content": "hi"}
    call = {"type": "tool_call", "id": "c", "name": "look", "arguments": {"at": "sky"}}
    inputs = [
        {"role": "user", "parts": [text]},
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "blue"}]},
    ]
    new = {
        "gen_ai.input.messages": inputs,
        "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "blue"}]}],
        "gen_ai.system_instructions": [{"type": "text", "content": "be"}],
        "gen_ai.tool.definitions": [{"type": "function", "name": "look", "parameters": {}}],
    }
    span = {
        "traceId": "t",
        "attributes": [*attributes(**new), {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "31"}}],
    }
    other = {"traceId": "t", "attributes": attributes(**{"http.method": "GET"})}
    otlp = {"resourceSpans": [{"scopeSpans": [{"spans": [other, span]}]}]}
    old = {
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "be",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "u",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "a",
    }
    inference = {"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "v"}
    lines = [
        otlp,
        *({"context": {"trace_id": name}, "attributes": one} for name, one in (("o", old), ("i", inference))),
    ]
    # Some write a message twice: as a text, and by its fields.
    inference |= {"llm.input_messages.0.message": "user: v"}
    first, second, third = calls_of(write(tmp_path / "spans.jsonl", *lines))
    assert roles(first) == "system user assistant tool"
    assert first.messages[2]["reasoning_content"] == "hm"
    assert first.messages[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
    assert (first.completion["content"], first.prompt_tokens, first.tools[0]["type"]) == ("blue", 31, "function")
    assert (roles(second), second.completion["content"], roles(third)) == ("system user", "a", "user")
    with pytest.raises(TraceError, match="OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true"):
        calls_of(write(tmp_path / "none.jsonl", {"resourceSpans": [{"scopeSpans": [{"spans": [other]}]}]}))


def test_events_of_openhands(tmp_path: Path) -> None:
    """By hand, after public trajectories of both of its agents: a response is a call, observations are results."""
    made = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    response = {
        "id": "r1",
        "choices": [{"message": {"content": "ok", "tool_calls": [made]}}],
        "usage": {"prompt_tokens": 40},
    }
    meta = {"tool_call_id": "c", "function_name": "run", "model_response": response, "total_calls_in_response": 1}
    first = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "be", "tools": [{"type": "function"}]}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "go"}},
        {"id": 2, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": meta},
        {"id": 3, "source": "agent", "observation": "run", "content": "out", "tool_call_metadata": meta},
        {"id": 4, "source": "agent", "action": "message", "args": {"content": "done"}},
    ]
    for number, event in enumerate(first):
        write(tmp_path / "v0" / "events" / f"{number}.json", event, indent=1)
    found = calls_of(tmp_path / "v0")
    assert [roles(call) for call in found] == ["system user", "system user assistant tool"]
    assert (found[0].prompt_tokens, len(found[0].tools)) == (40, 1)
    text = [{"type": "text", "text": "go"}]
    action = {
        "kind": "ActionEvent",
        "id": "e2",
        "source": "agent",
        "llm_response_id": "r",
        "tool_name": "run",
        "thought": text,
    }
    sdk = [
        {"kind": "SystemPromptEvent", "id": "e0", "system_prompt": {"type": "text", "text": "be"}, "tools": [{}]},
        {"kind": "MessageEvent", "id": "e1", "source": "user", "llm_message": {"role": "user", "content": text}},
        {**action, "tool_call_id": "c1", "tool_call": {"id": "c1", "arguments": "{}"}, "reasoning_content": "hm"},
        {**action, "tool_call_id": "c2", "tool_call": {"id": "c2", "arguments": "{}"}},
        {"kind": "ObservationEvent", "id": "e4", "tool_call_id": "c1", "observation": {"content": text}},
        {"kind": "Condensation", "id": "e5", "forgotten_event_ids": ["e4"], "summary": "so far"},
        {"kind": "MessageEvent", "id": "e6", "source": "agent", "llm_message": {"role": "assistant", "content": text}},
    ]
    found = calls_of(write(tmp_path / "output.jsonl", {"instance_id": "i", "history": sdk}))
    assert [roles(call) for call in found] == ["system user", "system user assistant user"]
    assert len(found[1].messages[2]["tool_calls"]) == 2
    assert found[1].messages[2]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": "m", "prompt": "x"}, r"/v1/completions .*bodies of /v1/chat/completions"),
        ({"text": "x", "sampling_params": {}}, "SGLang's /generate"),
        ({"trace": {}, "observations": []}, "a Langfuse export"),
        ({"eval": {}, "samples": []}, "an inspect_ai log"),
        ({"log": {"version": "1.2", "entries": []}}, "HTTP exchanges without a call of a model"),
        ({"id": "a", "conversations": [{"from": "human", "value": "x"}]}, "a ShareGPT data set"),
        ("interactions:\n- request:\n    body: x", "HTTP exchanges without a call of a model"),
        ("interactions:\n- request: &a {b: [*a, *a]}", "log: interaction 1: a VCR cassette with aliases"),
        ("interactions:\n- request: {b: [", "log: interaction 1: bad YAML"),
        ("Timestamp,Model,Request tokens\n5,ChatGPT,472", "a table of lengths and times"),
        ("PK\x03\x04rest", "a zip archive .*inspect"),
        ("INFO: Received request chatcmpl-1: params: SamplingParams(n=1)", "vLLM's request log"),
    ],
)
def test_what_is_not_read_is_named_with_a_remedy(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(write(tmp_path / "log", content))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    """A pickle runs code when it is read; SGLang's dumps are such files."""
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(TraceError, match=r"a pickle .*--log-requests-level 3"):
        load(tmp_path / "dump.pkl")


def test_who_does_not_ask_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "log.jsonl", request("1"), {"a": 1})
    list(load(path))
    assert "passed over 1 line: 1 unknown trace format: its keys are a" in caplog.text


def test_counted_and_recorded_tokens_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(recorded: int) -> dict[str, object]:
        choice = {"message": {"role": "assistant", "content": "ok"}}
        return request("word " * 100, response={"choices": [choice], "usage": {"prompt_tokens": recorded}})

    for recorded, expected in ((112, ""), (400, "400 prompt tokens for 1 calls, 1")):
        assert main(["census", str(write(tmp_path / "log.jsonl", line(recorded))), "--quiet"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("the log recorded" in out) is bool(expected)
        assert expected in out


def test_stdin_is_a_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from pic_traces import source

    data = gzip.compress("".join(json.dumps(request("u0")) + "\n" for _ in range(2)).encode())
    monkeypatch.setattr(source, "_STDIN", [])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["census", "-", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["calls"] == 2
    assert source.short_name("-") == "stdin"


def test_a_log_is_held_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_HELD_BYTES", 1 << 10)
    with pytest.raises(TraceError, match="distinct messages"):
        calls_of(write(tmp_path / "log.jsonl", *(request(f"{number} " * 100) for number in range(9))))
    # What repeats is held once.
    assert len(calls_of(write(tmp_path / "same.jsonl", *([request("x" * 500)] * 9)))) == 9


def test_thoughts_are_shown_behind_the_last_user_message(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "a long thought"}
    asked = [{"role": "user", "content": "u"}]
    lines = [
        {"messages": asked, "response": {"choices": [{"message": answer}]}, "session_id": "s"},
        {"messages": [*asked, answer, {"role": "tool", "content": "r"}], "session_id": "s"},
        {"messages": [*asked, answer, {"role": "user", "content": "v"}], "session_id": "s"},
    ]
    encoder = load_encoder(None)
    encoded = [encoder.encode(call) for call in calls_of(write(tmp_path / "log.jsonl", *lines))]
    shown = [one.text(0, len(one.path)) for one in encoded]
    assert ["a long thought" in text for text in shown] == [True, True, False]
    assert shown[1].startswith(shown[0])


def test_hub_names_are_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TraceError, match=r"nothing is downloaded here: `hf download org/model"):
        load_encoder("org/model")
    folder = tmp_path / "models--org--model" / "snapshots" / "abc"
    write(folder / "tokenizer.json", "no tokenizer")
    with pytest.raises(TraceError, match=r"abc.tokenizer\.json cannot be read"):
        load_encoder("org/model")
    with pytest.raises(TraceError, match=r"abc.tokenizer\.json cannot be read"):
        load_encoder(str(folder / "tokenizer.json"))


def test_equal_images_are_told_from_others(tmp_path: Path) -> None:
    def shown(url: str, **fields: object) -> dict[str, object]:
        part = {"type": "image_url", "image_url": {"url": url}, **fields}
        return {"messages": [{"role": "user", "content": [part]}]}

    marked = shown("data:a", cache_control={"type": "ephemeral"})
    found = calls_of(write(tmp_path / "log.jsonl", shown("data:a"), marked, shown("data:b")))
    encoder = load_encoder(None)
    first, second, third = (encoder.encode(call).tokens.tolist() for call in found)
    assert first == second != third
