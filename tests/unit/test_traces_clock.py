"""`clock:TRACE`: one line changes with every call, and nothing else of the trace does."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import Call, CallSpec, Message, Session, load
from pic_traces.clock import set_clocks
from pic_traces.errors import TraceError

from tests.unit.test_traces_formats import request, write

texts = st.text(max_size=8)
contents = st.none() | texts | st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=2)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
messages = st.fixed_dictionaries({"role": roles, "content": contents})


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    pool = draw(st.lists(messages, min_size=1, max_size=6))
    places = st.tuples(st.integers(0, len(pool) - 1), st.integers(0, 4))
    spans = places.map(lambda place: (place[0], min(sum(place), len(pool))))
    prompts = st.lists(spans, min_size=1, max_size=3).filter(lambda found: any(start < end for start, end in found))
    specs = [
        CallSpec(spans=tuple(prompt), completion=draw(st.none() | st.integers(0, len(pool) - 1)), agent=draw(texts))
        for prompt in draw(st.lists(prompts, max_size=4))
    ]
    return Session(session_id=draw(texts), source="s", pool=pool, specs=specs, license="MIT")


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
