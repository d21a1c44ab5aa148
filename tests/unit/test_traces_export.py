"""Traces and runs in other tools' forms: keys and units as those read them, equal ids where prefixes are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pic_traces import load
from pic_traces.encode import load_encoder
from pic_traces.export import aiperf_rows, message_rows, mooncake_rows
from pic_traces.pace import Pace
from pic_traces.records import Status, load_records

from sglang_pic.cli import main

DEMO = Path(__file__).resolve().parents[2] / "bench" / "results" / "demo" / "sample-agents" / "arms" / "pic"
PACE = Pace(spread_s=10.0, pause_s=2.0)


def test_blocks_have_ids_in_common_where_prompts_begin_alike() -> None:
    block = 64
    rows = list(mooncake_rows(load("sample:agents"), PACE, None, block))
    encoder = load_encoder(None)
    prompts = [encoder.encode(call).tokens.tolist() for session in load("sample:agents") for call in session.calls()]
    assert [row["input_length"] for row in rows] == list(map(len, prompts))
    # An id is a beginning of a prompt, and each beginning has one.
    named: dict[int, list[int]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        assert len(row["hash_ids"]) == -(-len(prompt) // block)
        for number, one in enumerate(row["hash_ids"], start=1):
            assert named.setdefault(one, prompt[: number * block]) == prompt[: number * block]
    assert len(named) == len({tuple(prefix) for prefix in named.values()}) < sum(len(row["hash_ids"]) for row in rows)


def test_a_session_begins_at_a_moment_and_goes_on_after_pauses() -> None:
    rows = list(message_rows(load("sample:agents"), PACE, None))
    first = [row for row in rows if "timestamp" in row]
    assert len(first) == len({row["session_id"] for row in rows}) == 3
    assert all(0 <= row["timestamp"] < 10_000 for row in first)
    assert all(("timestamp" in row) != ("delay" in row) for row in rows)
    calls = [call for session in load("sample:agents") for call in session.calls()]
    given = [(call.messages, call.tools or None) for call in calls]
    assert [(row["messages"], row.get("tools")) for row in rows] == given


def test_requests_of_a_run_have_aiperfs_names_and_units() -> None:
    records = [record for record in load_records(DEMO) if record.status is Status.OK]
    row = next(row for row in aiperf_rows(records) if row["metadata"]["benchmark_phase"] == "profiling")
    record = next(record for record in records if not record.warmup)
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    assert values["time_to_first_token"] == pytest.approx(1000 * record.ttft_s)
    assert values["request_latency"] == pytest.approx(1000 * record.e2e_s)
    between = values["inter_token_latency"]
    assert between * (record.output_tokens - 1) == pytest.approx(1000 * (record.e2e_s - record.ttft_s))
    assert values["output_token_throughput_per_user"] == pytest.approx(1000 / between)
    assert values["input_sequence_length"] == record.prompt_tokens
    assert row["metadata"]["request_end_ns"] > row["metadata"]["request_start_ns"]
    assert row["error"] is None


def test_the_verb_writes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", str(DEMO), "--to", "aiperf", "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == len(load_records(DEMO))
    assert all(set(json.loads(line)) == {"metadata", "metrics", "error"} for line in out.read_text().splitlines())
    assert main(["export", "sample:agents", "--to", "mooncake", "--out", str(out)]) == 2
    assert main(["export", "sample:agents", "--to", "aiperf", "--out", str(tmp_path / "other")]) == 2
    assert "no folder" in capsys.readouterr().err
