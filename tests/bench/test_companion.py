"""The companion: its figures are the records', and a reader can reach all of them without a mouse or a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from pic_replay.records import load_records

pytest.importorskip("torch", reason="the model's folder is written with torch")
from pic_bench.companion.__main__ import Payload, read_payload
from pic_bench.report.study import RESULTS


@pytest.fixture(scope="module")
def payload(model_dir: Callable[[str], Path]) -> Payload:
    return read_payload(model_dir("smollm2"))


def test_calls_have_the_servers_lengths_and_their_pieces_add_up(payload: Payload) -> None:
    for scene in payload.scenes:
        records = [each for each in load_records(RESULTS / scene.record / "arms" / "pic") if not each.warmup]
        recorded = [
            (each.session_id, each.call, each.prompt_tokens, each.prefix_hit_tokens, each.chunk_hit_tokens)
            for each in records
        ]
        calls = [(each.session, each.index, each.prompt_len, each.prefix_len, each.moved_len) for each in scene.calls]
        assert sorted(recorded) == sorted(calls)
        drawn = [call for call in scene.calls if call.pieces]
        assert len(drawn) > len(scene.calls) / 2
        for call in drawn:
            starts = [0, *(piece.end for piece in call.pieces)]
            lengths = [(piece.kind, piece.end - start) for piece, start in zip(call.pieces, starts, strict=False)]
            assert min(length for _, length in lengths) > 0
            assert starts[-1] == call.prompt_len
            assert sum(length for kind, length in lengths if kind == "prefix") == call.prefix_len
            assert sum(length for kind, length in lengths if kind == "moved") == call.moved_len


def test_recovery_of_the_prompts_is_the_summarys(payload: Payload) -> None:
    """The prompts that are shown are those that the study counts, each with its own record."""
    for number, (_, name) in enumerate(payload.edits.formats):
        cells = json.loads((RESULTS / name / "summary.json").read_text())["cells"]
        for arm in ("in_place", "notes"):
            (cell,) = (cell for cell in cells if (cell["group"], cell["arm"]) == ("all", arm))
            outcomes = [prompt.outcomes[number] for prompt in payload.edits.prompts]
            counted = [each[arm] for each in outcomes if arm in each and any(o.spliced for o in each.values())]
            told = [outcome.recovery for outcome in counted if outcome.recovery is not None]
            assert len(told) == cell["n"]
            assert fmean(told) == pytest.approx(cell["recovery"]["value"])
