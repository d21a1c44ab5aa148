"""The sample that travels with the package."""

from __future__ import annotations

from pathlib import Path

import pic_traces
import pytest
from pic_traces import load
from pic_traces.data.choose import MAX_PROMPT_TOKENS, MAX_SESSION_TOKENS, MIN_CALLS, choose
from pic_traces.encode import load_encoder
from pic_traces.errors import TraceError

from tests.unit.test_traces_formats import write


def test_the_sample_is_what_its_readme_says() -> None:
    sessions = list(load("sample:opendevin"))
    agents = "BrowsingAgent CodeActAgent CodeActSWEAgent DelegatorAgent ManagerAgent PlannerAgent"
    assert [session.session_id.split("-")[3] for session in sessions] == agents.split()
    assert sum(session.num_calls for session in sessions) == 36
    assert {session.license for session in sessions} == {"MIT"}
    for session in sessions:
        for call in session.calls():
            assert call.messages
            assert call.completion is not None
            assert call.completion["role"] == "assistant"


def test_the_demos_sample_keeps_its_rule() -> None:
    sessions = list(load("sample:agents"))
    assert [(session.source, session.num_calls) for session in sessions] == [
        ("opendevin_integration", 11),
        ("taubench_airline_gpt4o", 9),
        ("miniswe_deepseek", 10),
    ]
    assert {session.license for session in sessions} == {"MIT"}
    encoder = load_encoder(None)
    for session in sessions:
        lengths = [len(encoder.encode(call).tokens) for call in session.calls()]
        assert len(lengths) >= MIN_CALLS
        # The stand-in counts up to 15 % more than the tokenizer by which the sessions were chosen.
        assert max(lengths) < 1.15 * MAX_PROMPT_TOKENS
        assert sum(lengths) < 1.15 * MAX_SESSION_TOKENS


def test_the_rule_takes_the_most_calls_and_then_the_fewest_tokens(tmp_path: Path) -> None:
    def session(name: str, num_calls: int, text: str) -> dict[str, object]:
        messages = [{"role": role, "content": text} for role in ("user", "assistant")] * num_calls
        calls = {"messages": messages, "turns": list(range(1, 2 * num_calls, 2))}
        return {"session_id": name, **calls, "license": "MIT", "meta": {"a": 1}}

    found = [session("long", 9, "two words"), session("short", 9, "word"), session("few", 7, "word")]
    path = write(tmp_path / "sessions.jsonl", *found, session("grows", 40, "word " * 150))
    chosen = choose(path, load_encoder(None))
    assert set(chosen) == {"session_id", "license", "messages", "turns"}
    assert (chosen["session_id"], chosen["turns"]) == ("grows", list(range(1, 29, 2)))
    assert choose(write(path, *found), load_encoder(None))["session_id"] == "short"


def test_licences_travel_with_the_samples() -> None:
    readme = (Path(pic_traces.__file__).parent / "data" / "README.md").read_text()
    for project in ("OpenDevin/OpenDevin", "sierra-research/tau-bench", "SWE-agent/mini-swe-agent", "Django"):
        assert project in readme
    assert "Permission is hereby granted" in readme
    assert "Redistribution and use in source and binary forms" in readme


def test_an_unknown_sample_names_the_known_ones() -> None:
    with pytest.raises(TraceError, match="sample:nothing: no such sample; sample:agents, sample:opendevin are there"):
        load("sample:nothing")
