"""The windows of a paced replay, and their picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pic_bench.lasting import main, summarize
from pic_traces.errors import TraceError
from pic_traces.records import RequestRecord, Status
from pic_traces.replay.options import ReplayOptions

from sglang_pic.cli import main as cli
from tests.unit.replay_records import record, write_records

OPTIONS = ReplayOptions(trace="t", base_url="http://h", out="o", spread_s=600.0, pause_s=5.0)


def call(at: float, chunk: int, **fields: Any) -> RequestRecord:
    """A request of 100 tokens of which 40 were prefix hits."""
    known = {"scheduled_at": at, "prompt_tokens": 100, "prefix_hit_tokens": 40, "chunk_hit_tokens": chunk}
    return record(0, **{**known, **fields})


def test_calls_count_in_the_window_they_were_scheduled_in() -> None:
    records = [call(-1.0, 60, warmup=True), call(59.0, 30), call(61.0, 10), call(601.0, 60)]
    records += [call(70.0, 0, status=Status.FAILED), call(80.0, 0, status=Status.SKIPPED)]
    found = summarize(records, OPTIONS, window_s=60.0, warmup_windows=1)
    assert [window.calls for window in found.windows] == [1, 1] + [0] * 8
    assert [window.chunk_tokens for window in found.windows[:2]] == [30, 10]
    assert (found.calls, found.failed, found.skipped) == (2, 1, 1)
    assert found.trends.recovered is None, "of one window"
    with pytest.raises(TraceError, match="no --spread-s"):
        summarize(records, msgspec.structs.replace(OPTIONS, spread_s=None), window_s=60.0, warmup_windows=1)
    with pytest.raises(TraceError, match="--enable-cache-report"):
        summarize([call(1.0, 0, prefix_hit_tokens=None)], OPTIONS, window_s=60.0, warmup_windows=1)


@pytest.mark.parametrize(("falls", "code"), [(False, 0), (True, 3)])
def test_a_share_that_falls_is_told_by_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, falls: bool, code: int
) -> None:
    words = ["census", "gen:agent_meta?header=50&calls=4&sessions=30&body=300", "--hours", "0.1", "--windows", "1"]
    assert cli([*words, "--pool-share", "1", "--json"]) == 0
    (tmp_path / "census.json").write_text(capsys.readouterr().out)
    records = [call(10.0 * at, 50 - at * falls - at % 3) for at in range(50)]
    write_records(tmp_path, records)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(OPTIONS))
    flags = ["--replay", str(tmp_path), "--census", str(tmp_path / "census.json"), "--window-s", "60"]
    assert main([*flags, "--out", str(tmp_path / "out")]) == code
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["calls"] == 50
    ET.parse(tmp_path / "out" / "lasting.svg")
    assert main([*flags[:2], "--census", str(tmp_path / "none"), "--out", str(tmp_path)]) == 1
