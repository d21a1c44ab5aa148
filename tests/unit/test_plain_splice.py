"""The splice in plain PyTorch: its control, what it refuses, and where it says the rows come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pic_bench.fidelity.cases.qa import QaFrames, qa_case
from pic_bench.fidelity.cases.text import ModelText
from pic_bench.plain_splice import MOST_ERROR, PlainModel, main, placements
from pic_traces.questions import generated_questions


def test_every_donor_holds_its_block_where_it_says(model_dir: Callable[[str], Path]) -> None:
    text = ModelText(model_dir("tiny-gqa"))
    frames = QaFrames(text)
    (question,) = generated_questions("pairs", limit=1, seed=0)
    case = qa_case(frames, text, question, seed=0)
    ways = placements(frames, text, case)
    assert len({way.name for way in ways}) == len(ways) == 4
    for way in ways:
        for (start, end), donor in zip(case.blocks, way.donors, strict=True):
            assert donor.ids[donor.start : donor.start + end - start] == case.prompt[start:end]
    moved = ways[-1].donors
    assert len({block.start - donor.start for block, donor in zip(case.blocks, moved, strict=True)}) == 1


def test_it_measures_and_proves_itself(
    model_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain.json"
    assert main(["--model", str(model_dir("tiny-gqa")), "--questions", "1", "--quiet", "--out", str(out)]) == 0
    assert "| same order, other words around |   32 |" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["control_kl"] <= MOST_ERROR
    kl = {(row["donors"], row["seam_tokens"]): row["kl_mean"] for row in found["rows"]}
    assert kl["full prefill", None] == 0
    # Random weights have no use for a context, but any other context must move the logits by more than rounding does.
    assert min(kl["in another order", 0], kl["each alone", 32]) > 10 * found["control_kl"]


def test_keys_left_as_they_were_are_found_out(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlainModel, "_turned", lambda self, keys, shift: keys)
    assert main(["--model", str(model_dir("tiny-gqa")), "--questions", "1", "--quiet"]) == 1
    assert "keys moved by 37 and back differ by a KL of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("tiny-gqa", ["--data", __file__], "bad JSON"),
        ("tiny-gqa", ["--data", "nowhere.jsonl"], "no question set"),
        ("tiny-mla", [], "only models whose keys are rotated whole"),
    ],
)
def test_what_it_refuses(
    model: str,
    arguments: list[str],
    said: str,
    model_dir: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", str(model_dir(model)), "--quiet", *arguments]) == 1
    assert said in capsys.readouterr().err
