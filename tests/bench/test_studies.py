"""Studies with servers: how they end and where results go; the soak's requests and judge."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pic_bench.core import CoreResult
from pic_bench.environment import capture_environment
from pic_bench.report.markdown import Table
from pic_bench.report.study import RESULTS
from pic_bench.soak.__main__ import Control, Soak
from pic_bench.soak.client import TOLERANCE, difference
from pic_bench.soak.load import Fault, requests, sessions
from pic_bench.soak.watched_server import Memory
from pic_bench.study_command import Finding, Study, at_least
from pic_traces.encode import load_encoder

from sglang_pic.errors import BenchError

KINDS = {"core.json": CoreResult, "soak*.json": Soak}


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


def test_how_a_study_with_servers_ends(capsys: pytest.CaptureFixture[str]) -> None:
    for raised, code, said in (
        (BenchError("the server ended"), 1, "name: the server ended\n"),
        (KeyboardInterrupt(), 130, "interrupted; servers stopped\n"),
    ):
        folders: list[Path] = []
        assert make(raised, folders)([]) == code
        assert capsys.readouterr().err == said
        assert not folders[0].exists()


TOP = ({1: -0.5, 2: -0.5001, 3: -4.0}, {4: -0.1, 5: -3.0})


def answer(tokens: list[int], tops: tuple[dict[int, float], ...]) -> dict[str, Any]:
    """As `/generate` has it."""
    places = [[[value, token, None] for token, value in top.items()] for top in tops]
    chosen = [[top.get(token, -9.0), token, None] for token, top in zip(tokens, tops, strict=True)]
    return {"meta_info": {"output_token_logprobs": chosen, "output_top_logprobs": places}}


def shifted(top: dict[int, float], token: int, by: float) -> dict[int, float]:
    return {**top, token: top[token] + by}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (answer([1, 4], TOP), None),
        (answer([1, 4], (shifted(TOP[0], 3, TOLERANCE / 2), TOP[1])), None),
        (answer([2, 9], (TOP[0], {9: -0.1, 8: -1.0})), None),
        (answer([3, 9], (TOP[0], {9: -0.1, 8: -1.0})), "3 instead of 1"),
        (answer([1, 4], (TOP[0], shifted(TOP[1], 5, 2 * TOLERANCE))), "token 1: log-probability of 5"),
        (answer([1, 4], (TOP[0], {4: -0.1, 6: -2.9})), "token 1: log-probability of"),
        (answer([1, 4], (shifted(TOP[0], 3, float("nan")), TOP[1])), "token 0: log-probability of 3"),
        (answer([1], TOP[:1]), "1 tokens, stock has 2"),
    ],
)
def test_rounding_is_told_from_another_answer(found: dict[str, Any], says: str | None) -> None:
    told = difference(answer([1, 4], TOP), found)
    assert (told is None) == (says is None)
    assert (says or "") in (told or "")


def test_a_seed_gives_the_same_requests_and_all_of_their_kinds() -> None:
    drawn, again = (
        [request for number, session in enumerate(played) for request in requests(session, number, 5)]
        for played in (islice(sessions(load_encoder(None), 5), 50) for _ in range(2))
    )
    assert drawn == again
    assert {request.fault for request in drawn} == set(Fault)
    assert any(request.is_compared for request in drawn)
    assert {(request.cache_salt, request.extra_key) for request in drawn} > {(None, None), (None, "key-a")}
    assert all(request.rid.count("-") == 3 for request in drawn)
    assert len({request.rid for request in drawn}) == len(drawn)


def test_a_soak_is_clean_where_nothing_is_wrong_and_the_controls_were_found() -> None:
    fields: dict[str, Any] = dict.fromkeys(Soak.__struct_fields__, 0) | {
        "environment": capture_environment(),
        "memory": Memory(after_warm_up=100.0, at_end=101.0),
        "control": Control(stale_rows=5, mismatches=8, num_mismatches=8),
    }
    assert Soak(**fields).is_clean
    unfound = [Control(stale_rows=n, mismatches=m, num_mismatches=8) for n, m in ((0, 8), (5, 7))]
    wrong = [{name: 1} for name in ("mismatches", "leaks", "stale_rows", "failures")]
    for changed in (*wrong, *({"control": control} for control in unfound)):
        assert not Soak(**{**fields, **changed}).is_clean
