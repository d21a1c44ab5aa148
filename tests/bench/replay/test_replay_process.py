"""The replay as users run it: real locust in its own process, against a small fake of the server's HTTP side."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pic_replay import ReplayOptions, run_replays
from pic_replay.client import StreamReply
from pic_replay.command import add_arguments, options_from
from pic_replay.prompt import prompt_key, prompt_part
from pic_replay.records import Latency, RequestRecord, Status, load_records, load_summary, summarize
from pic_replay.result import token_sources
from pic_traces import Call
from pic_traces.errors import OptionError
from pic_traces.flatten import flatten_tools, uses_tools

from tests.helpers.replay_server import ENV, PREFILL_S, FakeServer, Replay, command, record, write_trace


def by_call(out: Path) -> dict[tuple[str, int], RequestRecord]:
    """The trace's records by session and call."""
    return {(record.session_id, record.call): record for record in load_records(out) if not record.warmup}


def test_calls_of_a_session_run_in_order_with_recorded_history(fake: FakeServer, replay: Replay) -> None:
    out = replay({"a": ["one", "two", "three"], "b": ["four"]})
    sent = [[message["content"] for message in body["messages"]] for body in fake.trace_calls()]
    first = ["one", "answer 0", "two", "answer 1", "three"]
    assert sent == [first[:1], first[:3], first, ["four"]]
    assert all(before.finished_at <= (after.sent_at or 0) for before, after in pairwise(load_records(out)))
    summary = load_summary(out)
    assert (summary.requests, summary.completed, summary.failed, summary.warmup_requests) == (4, 4, 0, 1)
    assert summary.prompt_tokens == 1 + 4 + 7 + 1
    assert summary.computed_tokens == sum(n - n // 2 - n // 4 for n in (1, 4, 7, 1))
    files = ["config.json", "environment.json", "replay.log", "requests.jsonl", "summary.json"]
    assert sorted(path.name for path in out.iterdir()) == files
    server = {"model": "fake", "is_sglang": True, "version": "0.5.23", "context_len": 300, "can_tokenize": True}
    assert json.loads((out / "environment.json").read_text())["server"] == server


def test_replays_take_turns_and_the_longer_one_ends_alone(fake: FakeServer, tmp_path: Path) -> None:
    traces = {"a": ["one", "two"], "b": ["three", "four", "five", "six"]}
    several = [
        ReplayOptions(
            trace=write_trace(tmp_path / f"{name}.jsonl", {name: asked}),
            base_url=fake.url,
            out=str(tmp_path / name),
            quiet=True,
        )
        for name, asked in traces.items()
    ]
    records = [load_records(out) for out in run_replays(several)]
    sent = [body["messages"][-1]["content"] for body in fake.trace_calls()]
    assert sent == ["one", "three", "two", "four", "five", "six"]
    calls = sorted((r for some in records for r in some if not r.warmup), key=lambda r: r.sent_at or 0)
    assert all(record.schedule_delay_s < PREFILL_S for record in calls), "waiting for a turn is no delay"


def test_records_are_complete_and_time_to_first_token_is_real(fake: FakeServer, replay: Replay) -> None:
    fake.decode_s = 0.5
    out = replay(
        {"a": ["one two three four five six seven eight", "more"]},
        logprobs=20,
        custom_params={"pic": {"mode": "off"}},
        extra_body={"seed": 3, "custom_params": {"note": 1}},
        max_tokens=7,
    )
    first, second = by_call(out).values()
    assert (first.status, first.finish_reason, first.output_text) == (Status.OK, "length", "hello there you")
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (8, 6, 3)
    assert (first.prefix_hit_tokens, first.chunk_hit_tokens, first.computed_tokens) == (4, 2, 2)
    assert first.cached_tokens_details == {"device": 6, "host": 0, "pic": 2}
    assert first.output_token_ids == [1, 2, 3]
    assert first.first_top_logprobs == [("hello", -0.5)]
    assert first.output_logprobs == [-0.5, -0.5, -0.5]
    # Two tokens follow; a busy client may notice the first one half a second late.
    assert PREFILL_S <= first.ttft_s <= first.e2e_s - fake.decode_s
    assert 0 <= first.scheduled_at <= first.sent_at < first.first_token_at < first.last_token_at <= first.finished_at
    assert second.scheduled_at >= first.finished_at
    body = fake.trace_calls()[0]
    assert body["custom_params"] == {"pic": {"mode": "off"}, "note": 1}
    assert (body["temperature"], body["max_tokens"], body["seed"], body["top_logprobs"]) == (0, 7, 3, 20)
    assert "logprob_start_len" not in body


def test_failed_and_too_long_requests_are_counted_and_the_session_goes_on(replay: Replay) -> None:
    out = replay({"a": ["FAIL", "BREAK", "fine"], "b": ["word " * 290], "c": ["fine"]})
    records = by_call(out)
    assert [records["a", call].status for call in range(3)] == [Status.FAILED, Status.FAILED, Status.OK]
    assert (records["a", 0].http_status, records["a", 0].error) == (500, "out of luck")
    assert "IncompleteRead" in (records["a", 1].error or "")
    skipped = records["b", 0]
    assert skipped.status is Status.SKIPPED
    assert skipped.reason == "prompt of 290 tokens + 16 output tokens > context of 300"
    assert skipped.prompt_tokens == 290
    summary = load_summary(out)
    assert (summary.requests, summary.completed, summary.failed, summary.skipped) == (5, 2, 2, 1)
    assert summary.prompt_tokens == 7 + 1
    assert summary.stopped is None


@pytest.mark.parametrize("shows_tools", [True, False])
def test_hidden_tools_are_flattened(fake: FakeServer, replay: Replay, tmp_path: Path, shows_tools: bool) -> None:
    fake.shows_tools = shows_tools
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages: list[Any] = [
        {"role": "user", "content": "What is up?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "clouds"},
        {"role": "assistant", "content": "Clouds.", "reasoning_content": "hm"},
    ]
    session = {"session_id": "a", "tools": tools, "messages": messages, "turns": [1, 3]}
    (tmp_path / "t.jsonl").write_text(json.dumps(session))
    out = replay(str(tmp_path / "t.jsonl"))
    body = fake.trace_calls()[-1]
    assert load_summary(out).tools_flattened is not shows_tools
    sent = messages[:3] if shows_tools else flatten_tools(messages[:3], tools)
    assert (body["messages"], body.get("tools")) == (sent, tools if shows_tools else None)


def test_any_openai_server_will_do(fake: FakeServer, replay: Replay) -> None:
    """Only OpenAI's own fields are sent, and unknown cache hits stay unknown instead of becoming zero."""
    fake.sglang = False
    summary = load_summary(replay({"a": ["one", "word " * 290]}, base_url=fake.url + "/v1/"))
    assert (summary.completed, summary.skipped, summary.computed_tokens) == (1, 1, None)
    known = {"model", "messages", "temperature", "max_tokens", "stream", "stream_options"}
    assert set(fake.trace_calls()[0]) == known


def test_an_aborted_request_has_failed_and_a_tool_call_is_an_answer(replay: Replay) -> None:
    """An aborted one would count as very fast, and all answers that call tools alone as the same."""
    aborted, *calls = by_call(replay({"a": ["ABORT"], "b": ["CALL x"], "c": ["CALL y"]})).values()
    assert (aborted.status, aborted.error) == (Status.FAILED, "the server aborted the request")
    assert [one.output_text for one in calls] == ['ask{"of": "CALL x"}', 'ask{"of": "CALL y"}']
    assert all(one.status is Status.OK and one.ttft_s for one in calls)


def test_a_run_is_not_overwritten_unless_forced(fake: FakeServer, replay: Replay, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.log").write_text("kept")
    run = partial(replay, {"a": ["1", "2"], "b": ["3", "4"], "c": ["5"]}, limit_sessions=2, warmup=0)
    run()
    assert len(fake.seen) == 4
    with pytest.raises(OptionError, match=r"has a run already .*requests\.jsonl.*--force"):
        run()
    run(force=True)
    assert len(fake.seen) == 8
    assert (tmp_path / "run" / "server.log").read_text() == "kept"


def test_command_line(fake: FakeServer, tmp_path: Path) -> None:
    """Exit codes, the summary on stdout, and a stderr with nothing on it but the progress bar."""
    good = write_trace(tmp_path / "good.jsonl", {"a": ["one"]})
    bad = write_trace(tmp_path / "bad.jsonl", {"a": ["FAIL"]})

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True, env={**ENV, **env}, timeout=60, check=False)

    url, salt = fake.url.replace("://", "://secret:secret@"), '{"cache_salt": "secret"}'
    words = command(fake, good, tmp_path / "r1", "--json", "--extra-body", salt, "--base-url", url)
    done = run(*words, SGLANG_PIC_API_KEY="secret")
    assert done.returncode == 0
    assert json.loads(done.stdout)["completed"] == 1
    assert "1/1" in done.stderr
    assert "locust" not in done.stderr.lower()
    assert "arn" not in done.stderr
    assert not any("secret" in path.read_text() for path in (tmp_path / "r1").iterdir())
    done = run(*command(fake, good, tmp_path / "r2", "--quiet"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefix hit" in done.stdout
    assert run(*command(fake, bad, tmp_path / "r3", "--quiet")).returncode == 1
    done = run(*command(fake, good, tmp_path / "r4", "--sessions", "0"))
    assert done.returncode == 2
    assert done.stderr == "sglang-pic: error: sessions=0: must be 1 or more.\n"


def test_interrupt_keeps_what_was_done(fake: FakeServer, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", {"a": ["one", "HANG", "never"]})
    argv = command(fake, trace, tmp_path / "run")
    with subprocess.Popen(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert fake.hanging.wait(timeout=30)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the records so far are in" in errors
    statuses = {key: record.status for key, record in by_call(tmp_path / "run").items()}
    assert statuses == {("a", 0): Status.OK, ("a", 1): Status.INTERRUPTED}
    summary = load_summary(tmp_path / "run")
    assert (summary.planned, summary.requests, summary.interrupted, summary.stopped) == (3, 2, 1, "interrupted")


@pytest.mark.parametrize(
    ("usage", "extension", "expected"),
    [
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7}}, {"device": 7, "pic": 3}, (4, 3, 3)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 7, "pic": 3}}, None, (4, 3, 3)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}, {"device": 4, "host": 0}, (4, 0, 6)),
        ({"prompt_tokens": 10}, None, (0, 0, 10)),
        ({"prompt_tokens": 10}, {"device": 4, "host": 1, "pic": 3, "storage_backend": "x"}, (2, 3, 5)),
    ],
)
def test_token_sources(usage: Any, extension: Any, expected: tuple[int, int, int]) -> None:
    reply = StreamReply(usage=usage, extension={"cached_tokens_details": extension} if extension else {})
    sources = token_sources(reply, is_sglang=True)
    assert (sources.prefix_hit_tokens, sources.chunk_hit_tokens, sources.computed_tokens) == expected


def test_summary_counts_and_percentiles() -> None:
    tokens = {"prompt_tokens": 10, "prefix_hit_tokens": 4, "chunk_hit_tokens": 3, "computed_tokens": 3}
    records = [record(n, ttft_s=float(n), e2e_s=n + 1.0, output_tokens=2, **tokens) for n in range(11)]
    records += [record(0, status="failed", finished_at=4.0), record(0, status="skipped", prompt_tokens=9999)]
    records += [record(0, status="interrupted"), record(0, warmup=True, prompt_tokens=500, ttft_s=99.0)]
    summary = summarize(records, trace="t", model="m", planned=20)
    assert (summary.requests, summary.completed, summary.failed, summary.skipped) == (14, 11, 1, 1)
    assert (summary.interrupted, summary.warmup_requests, summary.planned) == (1, 1, 20)
    assert (summary.prompt_tokens, summary.prefix_hit_tokens, summary.chunk_hit_tokens) == (110, 44, 33)
    assert (summary.computed_tokens, summary.output_tokens, summary.wall_s) == (33, 22, 4.0)
    assert summary.ttft_s == Latency(mean=5.0, p50=5.0, p90=9.0, p95=9.5, p99=pytest.approx(9.9))
    assert summary.achieved_requests_per_s == 11 / 4
    assert summarize([], trace="t", model="m", planned=0).ttft_s == Latency()
    records = [record(0), record(1, computed_tokens=None)]
    assert summarize(records, trace="t", model="m", planned=2).computed_tokens is None, "one did not report"


def test_flattening_is_plain_and_complete() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
        {"role": "user", "content": "thanks"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert uses_tools(messages, None)
    assert not uses_tools(messages[3:], None)
    flat = flatten_tools(messages, tools)
    assert flat == [
        {"role": "system", "content": 'S\n\nTools:\n{"type":"function","function":{"name":"f"}}'},
        {"role": "assistant", "content": 'Let me see.\n[tool call] f {"x":"é"}'},
        {"role": "user", "content": "[tool result] f\nr"},
        {"role": "user", "content": "thanks"},
    ]
    assert not uses_tools(flat, None)
    assert flatten_tools(flat, None) == flat


def make_call(**fields: object) -> Call:
    values = {"session_id": "s", "index": 0, "completion": None, "tools": None, "agent": None, "options": {}}
    return Call(**{**values, **fields})


def test_prompt_part_keeps_thoughts_and_its_key_ignores_order() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    part = prompt_part(make_call(messages=messages, options={"tool_choice": "none"}), flatten=False)
    assert part == {"messages": messages, "tool_choice": "none"}
    assert prompt_part(make_call(messages=messages, options={"tool_choice": "none"}), flatten=True) == {
        "messages": messages
    }
    assert prompt_key({"a": 1, "b": 2}) == prompt_key({"b": 2, "a": 1}) != prompt_key({"a": 1})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sessions", "0"], r"sessions=0: must be 1 or more\."),
        (["--logprobs", "21"], "logprobs=21: must be 20 or less"),
        *(
            (["--base-url", url], "base_url='.*': must be like http")
            for url in ("localhost:3", "http://[::1", "http://h:99999")
        ),
        (["--custom-params", "[1]"], r"--custom-params='\[1\]': is list; a JSON object is expected"),
        (["--extra-body", "{"], r"--extra-body='\{': is not JSON"),
    ],
)
def test_bad_options(argv: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(OptionError, match=message):
        options_from(parser.parse_args(["t", "--base-url", "http://h", "--out", "o", *argv]))
