"""The replay's parts that need no process: stream reading, token sources, summaries, flattening, options."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from pic_replay import command
from pic_replay.client import StreamReply
from pic_replay.prompt import prompt_key, prompt_part
from pic_replay.records import Latency, summarize
from pic_replay.result import token_sources
from pic_traces import Call
from pic_traces.errors import OptionError
from pic_traces.flatten import flatten_tools, uses_tools

from tests.helpers.replay_records import record


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
        (["--spread-s", "9", "--sessions", "2"], "sessions=2: leave it out with spread_s"),
        (["--base-url", "localhost:3"], "base_url='localhost:3': must be like http"),
        (["--custom-params", "[1]"], r"--custom-params='\[1\]': is list; a JSON object is expected"),
        (["--extra-body", "{"], r"--extra-body='\{': is not JSON"),
    ],
)
def test_bad_options(argv: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(OptionError, match=message):
        command.options_from(parser.parse_args(["t", "--base-url", "http://h", "--out", "o", *argv]))
