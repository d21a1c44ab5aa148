"""`sglang-pic explain`: what it writes, prints and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pic.cli import main
from sglang_pic.explain import page as page_module

SAMPLE = "sample:opendevin"


def test_page_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["explain", SAMPLE, "gen:sysvar?sessions=1", "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0].startswith("56 calls, ")
    assert lines[2].split() == ["tokens", "calls", "what", "broke", "the", "prefix", "worst", "place"]
    assert "A clock or a date" in lines[3], "worst first"
    assert lines[-1].startswith(f"page: {out} (")
    assert list(tmp_path.iterdir()) == [out]


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["explain", SAMPLE, "--out", str(out), "--limit-calls", "3", "--limit-sessions", "1"]) == 0
    assert capsys.readouterr().out.startswith("3 calls, ")


def test_nothing_to_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gen:random?sessions=3", "--out", str(tmp_path / "page.html")]) == 0
    assert "No break cost tokens" in capsys.readouterr().out


def test_page_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    assert main(["explain", SAMPLE, "--out", str(out), "--limit-calls", "1"]) == 2
    assert out.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["explain", SAMPLE, "--out", str(out), "--limit-calls", "1", "--force"]) == 0
    assert out.read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit-calls", "0"], "--limit-calls=0"),
        (["--limit-sessions", "-2"], "--limit-sessions=-2"),
        ([SAMPLE], "named twice"),
    ],
)
def test_bad_values_are_usage(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", SAMPLE, *words, "--out", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_out_must_have_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", SAMPLE, "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert main(["explain", SAMPLE, "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n', "no text"),
        ('{"messages": [{"role": "user", "content": "x"}]}\nnot json\n', "log.jsonl:2"),
    ],
)
def test_what_is_wrong_with_the_last_file_is_found_first(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "log.jsonl"
    trace.write_text(text)
    assert main(["explain", SAMPLE, str(trace), "--out", str(tmp_path / "page.html")]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [trace]


def test_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["explain", SAMPLE, "--limit-calls", "1", "--out", str(tmp_path / "page.html")]
    with monkeypatch.context() as patch:
        patch.setattr(page_module, "html_page", interrupt)
        assert main(words) == 130
    # At the worst moment: everything is written and not yet in its place.
    monkeypatch.setattr(Path, "replace", interrupt)
    assert main(words) == 130
    assert list(tmp_path.iterdir()) == []
