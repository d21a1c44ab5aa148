"""sglang-pic census: what it prints, in facts and width, what it refuses, and that nothing counted is lost."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pic_traces.encode.standin import StandInEncoder
from pic_traces.errors import TraceError
from pic_traces.session import Call

from sglang_pic.cli import main

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
        assert sum(detail["chunk_tokens_by_role"].values()) == counts["chunk_tokens"]
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
