"""sglang-pic census --pool: hits by pool size in one pass, against an LRU cache of each size."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces.session import Session

from sglang_pic.census.pools import PoolCurve, RowStack
from sglang_pic.census.simulate import in_turns, simulate
from sglang_pic.cli import main
from tests.helpers.census_fakes import CONFIG, IdsEncoder, session

Capture = pytest.CaptureFixture[str]
Row = tuple[int, ...]
"""A row is known by the tokens up to its own."""


class Lru:
    """A cache of so many rows. Of a path the last rows are evicted first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: OrderedDict[Row, None] = OrderedDict()

    def num_resident(self, path: Row, start: int, end: int) -> int:
        return sum(path[: at + 1] in self.rows for at in range(start, end))

    def touch(self, path: Row) -> None:
        for at in range(len(path), 0, -1):
            self.rows.pop(path[:at], None)
            self.rows[path[:at]] = None
        while len(self.rows) > self.size:
            self.rows.popitem(last=False)


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=25), st.data())
def test_a_row_is_resident_in_caches_of_its_distance_and_more(paths: list[Row], data: st.DataObject) -> None:
    stack, caches = RowStack(), [Lru(size) for size in range(40)]
    known: list[Row] = []
    for path in paths:
        if known:
            old = data.draw(st.sampled_from(known))
            start = data.draw(st.integers(0, len(old) - 1))
            spans = list(stack.distances(np.array(old, np.int32), start, len(old)))
            assert sum(number for _, number in spans) == len(old) - start
            for cache in caches:
                resident = sum(min(max(cache.size - before, 0), number) for before, number in spans)
                assert resident == cache.num_resident(old, start, len(old))
        stack.touch(np.array(path, np.int32))
        known.append(path)
        for cache in caches:
            cache.touch(path)


def curve_of(sessions: list[Session], side_by_side: int) -> PoolCurve:
    """The hits by pool size of these sessions."""
    curve = PoolCurve()
    for outcome in simulate([("f", sessions)], IdsEncoder(), config=CONFIG, side_by_side=side_by_side):
        curve.observe(outcome)
    return curve


def growing(number: int) -> Session:
    """Three calls, each the one before with 50 tokens more."""
    text = list(range(1000 * number, 1000 * number + 150))
    return session(f"s{number}", [([text[:length]], []) for length in (50, 100, 150)])


def test_sessions_that_take_turns_need_room_for_all_of_them() -> None:
    """Both hit 50 and then 100 tokens. One after the other, room for one is enough."""
    sessions = [growing(1), growing(2)]
    assert [call.session_id for call in in_turns(sessions, 2)] == ["s1", "s2"] * 3
    assert [call.session_id for call in in_turns([*sessions, growing(3)], 2)] == ["s1", "s2"] * 3 + ["s3"] * 3
    apart, in_turn = curve_of(sessions, 1), curve_of(sessions, 2)
    assert apart.hits(1 << 30) == in_turn.hits(1 << 30) == apart.hits(100) == (300, 0)
    # s1 is hit behind 50 and 100 tokens of s2, s2 behind 100 and 150 of s1.
    assert in_turn.hits(250) == (300, 0)
    assert in_turn.hits(200) == (50 + 50 + 100 + 50, 0)
    assert in_turn.hits(50) == (0, 0)
    # All four hits begin with the row that was touched last: 4 * 38 is half of 300.
    assert (in_turn.least_pool(1), apart.least_pool(0.5)) == (250, 38)


def test_a_run_needs_its_donor_in_the_pool() -> None:
    text, filler = list(range(2000, 2100)), list(range(3000, 3400))
    calls = [([[7, 8, *text]], []), ([filler], []), ([[*range(500, 520), *text, 9]], [])]
    curve = curve_of([session("s", calls)], 1)
    prefix, spliced = curve.hits(1 << 30)
    assert (prefix, spliced > 80) == (0, True)
    # The donor's last row is the 102nd before the filler's.
    assert curve.hits(400) == (0, 0)
    assert curve.hits(502)[1] == spliced > curve.hits(501)[1] > 0


def test_the_table_and_the_picture(tmp_path: Path, capsys: Capture) -> None:
    words = ["census", "sample:opendevin", "--sessions", "4", "--pool", "24000"]
    assert main([*words, "--json", "--picture", str(tmp_path / "a.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    pools, total = found["pools"], found["total"]
    assert [one["tokens"] for one in pools["pools"]] == [12000, 24000, 48000, None]
    hits = [one["prefix_tokens"] + one["chunk_tokens"] for one in pools["pools"]]
    assert hits == sorted(hits)
    assert hits[-1] == total["prefix_tokens"] + total["chunk_tokens"]
    assert [one["host_tokens"] for one in pools["pools"][:2]] == [hits[1] - hits[0], hits[2] - hits[1]]
    assert pools["refused_calls"] == 0
    assert 12000 < pools["knee_tokens"] < 24000
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert main(words) == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.strip().startswith("24,000"))
    shares = [pools["pools"][1][name] / total["prompt_tokens"] for name in ("prefix_tokens", "chunk_tokens")]
    assert row[2:4] == [f"{share:.1%}" for share in shares]
    assert f"need {pools['knee_tokens']:,} tokens" in shown
    assert main(["census", "sample:opendevin", "--pool", "1000"]) == 0
    assert "refuses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--pool", "0"], "--pool=0: must be 1 or more"),
        (["--sessions", "-1"], "--sessions=-1: must be 1 or more"),
        (["--picture", "a.svg"], "set --pool TOKENS"),
        (["--pool", "9000", "--picture", "a.png"], "--picture='a.png': must be a file .svg"),
        (["--pool", "9000", "--picture", "none/a.svg"], "in a folder that exists"),
    ],
)
def test_bad_arguments(words: list[str], told: str, capsys: Capture) -> None:
    assert main(["census", "sample:opendevin", *words]) == 2
    assert told in capsys.readouterr().err
