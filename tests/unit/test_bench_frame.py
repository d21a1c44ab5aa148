"""What studies share: how they end, where results go. Every kept record loads as its study's result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pic_bench import core, idle_overhead
from pic_bench.frame import Finding, Study, at_least
from pic_bench.report.markdown import Table
from pic_bench.soak.__main__ import Soak

from sglang_pic.errors import BenchError

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
KINDS = {
    "core.json": core.CoreResult,
    "idle-overhead*.json": idle_overhead.IdleOverhead,
    "soak*.json": Soak,
}


@pytest.mark.parametrize("pattern", KINDS)
def test_every_kept_record_loads(pattern: str) -> None:
    found = sorted(RESULTS.glob(pattern))
    assert found
    for path in found:
        msgspec.json.decode(path.read_bytes(), type=KINDS[pattern])


class Result(msgspec.Struct):
    numbers: list[int]


def make(raised: BaseException | None = None, folders: list[Path] | None = None) -> Callable[..., int]:
    """The command of a study of one option."""
    study = Study("name", "What it is for.\n\n    an indented line", seed=3)
    study.add("--count", type=at_least(1), default=2, help="how many")

    @study.measures
    def main(args: argparse.Namespace, logs: Path) -> Finding:
        if folders is not None:
            folders.append(logs)
        if raised is not None:
            raise raised
        return Finding(Result([args.seed] * args.count), Table(["a"], [["b"]]), 4)

    return main


def test_a_result_goes_to_the_file_and_the_table_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, out = make(), tmp_path / "out.json"
    assert main(["--out", str(out)]) == 4
    assert json.loads(out.read_text()) == {"numbers": [3, 3]}
    assert capsys.readouterr().out.splitlines()[-1].split() == ["|", "b", "|"]
    assert main(["--json", "--count", "1", "--seed", "5"]) == 4
    assert json.loads(capsys.readouterr().out) == {"numbers": [5]}


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (BenchError("the server ended"), 1, "name: the server ended\n"),
        (KeyboardInterrupt(), 130, "interrupted; servers stopped\n"),
    ],
    ids=["an error", "an interruption"],
)
def test_how_a_study_with_servers_ends(
    capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, said: str
) -> None:
    folders: list[Path] = []
    assert make(raised, folders)([]) == code
    assert capsys.readouterr().err == said
    assert not folders[0].exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    main = make()
    for words in (["--help"], ["--count", "0"]):
        with pytest.raises(SystemExit):
            main(words)
    shown = capsys.readouterr()
    assert "    an indented line" in shown.out
    assert "how many (default: 2)" in shown.out
    assert "argument --count: 0: must be 1 or more" in shown.err
