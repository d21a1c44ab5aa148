"""The profile of the host's work runs, and its steps are those of a spliced request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pic_bench import host


def test_every_step_of_a_spliced_request_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MEASURED", {"32k, no hit": (1,), "32k, 8 runs": (2,)})
    assert host.main(["--requests", "2", "--chunks", "4000", "--out", str(tmp_path / "host.json")]) == 0
    result = msgspec.json.decode((tmp_path / "host.json").read_bytes(), type=host.HostResult)
    nothing, spliced = result.timings
    assert (nothing.num_runs, spliced.num_runs, spliced.case) == (0, 8, "32k, 8 runs of 2")
    assert nothing.steps["lay out"].p50_us == 0 < nothing.steps["plan"].p50_us
    assert [*spliced.steps] == [*host.STEPS]
    assert all(step.p50_us > 0 for step in spliced.steps.values())
