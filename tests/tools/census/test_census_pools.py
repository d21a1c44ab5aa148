"""sglang-pic census --pool: hits by pool size, against a plain LRU tree."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces.session import Session

from sglang_pic.census.outcome import CallRef
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.simulate import Cache, in_turns
from sglang_pic.cli import main
from tests.helpers.census_fakes import CONFIG, IdsEncoder, session

Capture = pytest.CaptureFixture[str]
Row = tuple[int, ...]
"""A row is known by the tokens up to its own."""


class Lru:
    """A tree in rows that are only looked up: of a node that is not used by a longer one all rows are evicted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.times: dict[Row, int] = {}
        self.ends: set[Row] = set()
        """The last rows of nodes."""
        self.now = 0

    def find(self, path: Row) -> int:
        """How many leading rows there are; they are touched, and a node is cut there."""
        found = max(end for end in range(len(path) + 1) if not end or path[:end] in self.times)
        at = path[:found]
        # What is cut off a node is the youngest before the path is touched.
        if found and at not in self.ends:
            self.ends.add(at)
            below = [row for row in self.times if row[:found] == at and len(row) > found]
            first_end = min((row for row in below if row in self.ends), key=len)
            self._touch(first_end, found)
        self._touch(at, 0)
        return found

    def insert(self, path: Row) -> None:
        self.find(path)
        self.ends.add(path)
        self._touch(path, 0)
        while len(self.times) > self.size:
            inner = {row[:end] for row in self.times for end in range(1, len(row))}
            leaf = min(self.ends - inner, key=self.times.__getitem__)
            self.ends.remove(leaf)
            length = len(leaf)
            while length and leaf[:length] not in self.ends:
                del self.times[leaf[:length]]
                length -= 1

    def _touch(self, path: Row, above: int) -> None:
        for end in range(len(path), above, -1):
            self.times.pop(path[:end], None)
            self.times[path[:end]] = self.now = self.now + 1


PATHS = st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple)


@given(st.lists(st.tuples(PATHS, PATHS), max_size=20), st.integers(8, 30))
def test_a_pool_evicts_whole_leaves_the_oldest_first(calls: list[tuple[Row, Row]], size: int) -> None:
    """Each call looks a donor up, then stores its own path."""
    tree, oracle = PrefixTree(size), Lru(size)
    for number, (donor, path) in enumerate(calls):
        assert tree.match(np.array(path, np.int32)).prefix_len == min(oracle.find(path), len(path) - 1)
        assert tree.num_resident(np.array(donor, np.int32)) == oracle.find(donor)
        tree.insert(np.array(path, np.int32), number)
        oracle.insert(path)
        assert len(oracle.times) <= size


def served(sessions: list[Session], side_by_side: int, pool: int) -> tuple[int, int]:
    """Prefix hits and spliced tokens of these sessions in a pool of so many tokens."""
    encoder = IdsEncoder()
    cache = Cache(CONFIG, encoder, pool=pool)
    calls = enumerate(in_turns(sessions, side_by_side))
    outcomes = [
        cache.serve(CallRef(n, "f", call.session_id, call.index), None, encoder.encode(call)) for n, call in calls
    ]
    return sum(one.prefix_len for one in outcomes), sum(one.num_chunk_hit for one in outcomes)


def growing(number: int) -> Session:
    """Three calls, each the one before with 50 tokens more."""
    text = list(range(1000 * number, 1000 * number + 150))
    return session(f"s{number}", [([text[:length]], []) for length in (50, 100, 150)])


def test_sessions_that_take_turns_need_room_for_all_of_them() -> None:
    """Both hit 50 and then 100 tokens. One after the other, room for one is enough."""
    sessions = [growing(1), growing(2)]
    assert [call.session_id for call in in_turns(sessions, 2)] == ["s1", "s2"] * 3
    assert [call.session_id for call in in_turns([*sessions, growing(3)], 2)] == ["s1", "s2"] * 3 + ["s3"] * 3
    assert served(sessions, 1, 150) == served(sessions, 2, 300) == (300, 0)
    # Where s1 stores 150, s2 loses its last 50.
    assert served(sessions, 2, 249) == (250, 0)
    assert served(sessions, 2, 150) == (150, 0)


def test_a_run_needs_its_donor_in_the_pool() -> None:
    text, filler = list(range(2000, 2100)), list(range(3000, 3400))
    calls = [([[7, 8, *text]], []), ([filler], []), ([[*range(500, 520), *text, 9]], [])]
    assert served([session("s", calls)], 1, 502)[1] > 80
    assert served([session("s", calls)], 1, 501) == (0, 0)


def test_the_table_and_the_picture(tmp_path: Path, capsys: Capture) -> None:
    words = ["census", "sample:opendevin", "--sessions", "4", "--pool", "24000"]
    assert main([*words, "--json", "--picture", str(tmp_path / "a.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    pools, total = found["pools"], found["total"]
    assert [one["tokens"] for one in pools["pools"]] == [12000, 24000, 48000, None]
    hits = [one["prefix_tokens"] + one["chunk_tokens"] for one in pools["pools"]]
    assert hits[0] < hits[1] <= hits[3]
    assert hits[-1] == total["prefix_tokens"] + total["chunk_tokens"]
    assert pools["pools"][0]["host_tokens"] == hits[1] - hits[0]
    assert not any(one["refused_calls"] for one in pools["pools"])
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert main(words) == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.strip().startswith("24,000"))
    shares = [pools["pools"][1][name] / total["prompt_tokens"] for name in ("prefix_tokens", "chunk_tokens")]
    assert row[2:4] == [f"{share:.1%}" for share in shares]
    knee = int(re.search(r"need about ([0-9,]+) tokens", shown)[1].replace(",", ""))
    assert 12000 < knee < 24000
    assert main(["census", "sample:opendevin", "--pool", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "refuses" in shown
    assert "not between these" in shown
