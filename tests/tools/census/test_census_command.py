"""sglang-pic census: what it prints, in facts and width, what it refuses, and that nothing counted is lost."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces.encode.standin import StandInEncoder
from pic_traces.errors import TraceError
from pic_traces.session import Call, Session

from sglang_pic.census.outcome import CallRef
from sglang_pic.census.prefix_tree import PrefixTree
from sglang_pic.census.simulate import Cache, in_turns
from sglang_pic.cli import main
from tests.helpers.census_fakes import CONFIG, IdsEncoder, session

COUNTS = ["sessions", "calls", "prompt_tokens", "prefix_tokens", "chunk_tokens", "new_tokens", "runs"]
GEN = "gen:agent_meta?header=50&calls=3&sessions=2&body=300"
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def counts_of(capsys: Capture, *words: str) -> dict[str, Any]:
    """What `--json` prints."""
    assert main(["census", "--json", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def log(path: Path, *contents: str) -> str:
    """A log of chat requests, a session each."""
    lines = [json.dumps({"messages": [{"role": "user", "content": text}], "response": "yes"}) for text in contents]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_json_of_the_sample(capsys: Capture) -> None:
    result = counts_of(capsys, "sample:opendevin", GEN, "--upper-bound")
    assert list(result) == ["files", "total"]
    files, total = result["files"], result["total"]
    assert [list(counts) for counts in files] == [["file", *COUNTS, "detail"]] * 2
    assert list(total) == [*COUNTS, "detail"]
    for counts in [*files, total]:
        assert all(type(counts[name]) is int for name in COUNTS)
        assert counts["prefix_tokens"] + counts["chunk_tokens"] + counts["new_tokens"] == counts["prompt_tokens"]
        detail = counts["detail"]
        assert detail["chunk_tokens_same_session"] + detail["chunk_tokens_other_session"] == counts["chunk_tokens"]
        # Runs of 64 tokens and more lie in windows of 64; a search finds at least what chunks do.
        bound = detail["upper_bound"]
        assert counts["chunk_tokens"] <= bound["tokens"] <= counts["prompt_tokens"] - counts["prefix_tokens"]
        assert 0 < bound["tokens_behind"] <= bound["tokens"]
        assert detail["is_complete"] is True
    assert [total[name] for name in COUNTS] == [sum(counts[name] for counts in files) for name in COUNTS]
    sample = files[0]
    assert (sample["file"], sample["sessions"], sample["calls"]) == ("sample:opendevin", 6, 36)
    assert sample["prefix_tokens"] > 0.3 * sample["prompt_tokens"]
    assert sample["chunk_tokens"] > 0.05 * sample["prompt_tokens"]
    most = counts_of(capsys, "sample:opendevin", "--preset", "most", "--upper-bound")["total"]
    assert most["chunk_tokens"] > 0.2 * most["prompt_tokens"]
    assert most["chunk_tokens"] > 0.97 * most["detail"]["upper_bound"]["tokens_behind"]


def test_files_are_told_apart_and_a_folder_is_one(tmp_path: Path, capsys: Capture) -> None:
    text = " ".join(f"word{n}" for n in range(400))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        log(tmp_path / name / "1.jsonl", text)
    one, two = str(tmp_path / "a"), str(tmp_path / "b")
    apart = counts_of(capsys, one, two)
    shared = counts_of(capsys, one, two, "--shared-cache")
    folder = counts_of(capsys, str(tmp_path))
    assert [counts["prefix_tokens"] for counts in apart["files"]] == [0, 0]
    first, second = (counts["prefix_tokens"] for counts in shared["files"])
    assert (first, second > 390) == (0, True)
    (counts,) = folder["files"]
    assert (counts["sessions"], counts["calls"], counts["prefix_tokens"]) == (2, 2, second)


def test_a_hybrid_model_hits_where_states_are(capsys: Capture) -> None:
    counts = counts_of(capsys, "sample:opendevin", GEN, "--hybrid")["total"]
    hybrid = counts["detail"]["hybrid"]
    assert 0 < hybrid["state_tokens"] < hybrid["placed_tokens"] <= counts["prefix_tokens"]
    assert counts_of(capsys, GEN)["total"]["detail"]["hybrid"] is None
    assert main(["census", GEN, "--hybrid"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"SGLang's prefix cache serves [\d.]+%, with checkpoints [\d.]+%\.", out)


@pytest.mark.parametrize("trace", ["sample:opendevin", "gen:sysvar?sessions=1"])
def test_edit_policies_are_priced(trace: str, capsys: Capture) -> None:
    """A field that the text behind it names, and a clock that nothing names."""
    totals = [counts_of(capsys, trace, "--edit", edit)["total"] for edit in ("in_place", "notes", "recompile")]
    assert totals[0]["chunk_tokens"] > totals[1]["chunk_tokens"] > totals[2]["chunk_tokens"]
    in_place, notes, recompile = changes = [total["detail"]["changed_fields"] for total in totals]
    assert all(change["calls"] > 0 and change["fields"] >= change["calls"] for change in changes)
    assert 0 == in_place["guarded_tokens"] < notes["guarded_tokens"] < recompile["guarded_tokens"]
    assert in_place["chunk_tokens"] > notes["chunk_tokens"] > recompile["chunk_tokens"] == 0


def test_a_bad_line_is_named_before_anything_is_counted(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"messages": \n')
    assert main(["census", GEN, str(path), "--strict"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match("sglang-pic: error: .*bad.jsonl:2", err)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([GEN], "is named twice"),
        (["log.jsonl", "./log.jsonl"], "'./log.jsonl': is named twice"),
        (["clock:log.jsonl", "clock:1@./log.jsonl"], "'clock:1@./log.jsonl': is named twice"),
        (["--limit-sessions", "0"], "--limit-sessions=0: must be 1 or more"),
        (["--min-run", "0"], "min_run_tokens=0"),
        (["--pool", "0"], "--pool=0: must be 1 or more"),
        (["--sessions", "-1"], "--sessions=-1: must be 1 or more"),
        (["--picture", "a.svg"], "set --pool TOKENS"),
        (["--pool", "9000", "--picture", "a.png"], "--picture='a.png': must be a file .svg"),
        (["--pool", "9000", "--picture", "none/a.svg"], "in a folder that exists"),
    ],
)
def test_arguments_that_are_not_allowed_are_named(words: list[str], what: str, capsys: Capture) -> None:
    assert main(["census", GEN, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, what in err) == ("", True), err


def test_a_log_beside_its_folder_is_named_twice(tmp_path: Path, capsys: Capture) -> None:
    """All of it would count as prefix hits, or double."""
    for name in ("a.jsonl", "b.jsonl", "read.txt"):
        (tmp_path / name).write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    folder, log = str(tmp_path), str(tmp_path / "b.jsonl")
    for words in ([folder, log], [log, folder]):
        assert main(["census", *words]) == 2
        assert f"{log!r}: is named twice" in capsys.readouterr().err
    assert main(["census", folder, f"clock:{log}", str(tmp_path / "read.txt"), GEN]) == 0


def end_at(call_number: int, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Let the encoder fail at a call, counting from 0."""
    encode, numbers = StandInEncoder.encode, count()

    def ends(self: StandInEncoder, call: Call) -> object:
        if next(numbers) == call_number:
            raise error
        return encode(self, call)

    patch.setattr(StandInEncoder, "encode", ends)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "sglang-pic: interrupted"), (TraceError("the template refuses call 2"), 2, "call 2")],
)
def test_counts_are_not_lost(error: BaseException, code: int, said: str, capsys: Capture, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        end_at(6 + 4, error, patch)
        assert main(["census", "--json", GEN, "sample:opendevin", "gen:random?sessions=1"]) == code
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert said in err
    assert [(counts["calls"], counts["detail"]["is_complete"]) for counts in result["files"]] == [(6, True), (4, False)]
    assert result["total"]["calls"] == 10
    assert result["total"]["detail"]["is_complete"] is False
    end_at(6 + 4, error, monkeypatch)
    assert main(["census", GEN, "sample:opendevin"]) == code
    assert "sample:opendevin: stopped after 4 calls; the row counts these calls only." in capsys.readouterr().out


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
