"""The sample that travels with the package."""

from __future__ import annotations

from pathlib import Path

import pic_traces
import pytest
from pic_traces import load
from pic_traces.errors import TraceError


def test_the_sample_is_what_its_readme_says() -> None:
    sessions = list(load("sample:opendevin"))
    agents = [session.session_id.split("-")[3] for session in sessions]
    assert agents == [
        "BrowsingAgent",
        "CodeActAgent",
        "CodeActSWEAgent",
        "DelegatorAgent",
        "ManagerAgent",
        "PlannerAgent",
    ]
    assert sum(session.num_calls for session in sessions) == 36
    assert {session.license for session in sessions} == {"MIT"}
    for session in sessions:
        for call in session.calls():
            assert call.messages
            assert call.completion is not None
            assert call.completion["role"] == "assistant"


def test_its_licence_travels_with_it() -> None:
    readme = (Path(pic_traces.__file__).parent / "data" / "README.md").read_text()
    assert "OpenDevin/OpenDevin" in readme
    assert "Permission is hereby granted" in readme


def test_an_unknown_sample_names_the_known_ones() -> None:
    with pytest.raises(TraceError, match="sample:nothing: no such sample; sample:opendevin is there"):
        load("sample:nothing")
