"""The study of the cost gate: its record is what the code makes, and the gate loses little on machines it never saw."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pic_bench.cost_gate import MACHINES, Study, both_ways, main, study_machine

RESULTS = Path(__file__).resolve().parent.parent.parent / "bench" / "results"


@pytest.fixture(scope="module")
def study() -> Study:
    return msgspec.json.decode((RESULTS / "cost-gate.json").read_bytes(), type=Study)


def test_the_record_is_reproduced(study: Study) -> None:
    for row in (study.reported[0], study.reported[1], study.reported[-1]):
        again = study_machine(row.machine, study.seeds)
        for rule in ("gate", "always", "short_slope"):
            assert getattr(again, rule).lost == pytest.approx(getattr(row, rule).lost, abs=1e-9)
            assert getattr(again, rule).wrong == pytest.approx(getattr(row, rule).wrong)


def test_the_gate_loses_less_than_the_simpler_rules(study: Study) -> None:
    assert [row.machine for row in study.reported] == [m for each in MACHINES["reported"] for m in both_ways(each)]
    for row in study.reported:
        assert row.gate.lost < 0.02
        assert row.gate.lost <= row.always.lost
        assert row.gate.lost <= row.short_slope.lost + 1e-9
    assert study.reported[0].short_slope.lost == pytest.approx(1.0), "it rejects every run"


def test_constants_were_not_chosen_on_what_is_reported() -> None:
    chosen_on, reported = ({machine.name for machine in MACHINES[name]} for name in ("for_choosing", "reported"))
    assert not chosen_on & reported


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--out", str(tmp_path / "gate.json")]) == 0
    assert "135M, H100" in capsys.readouterr().out
    assert msgspec.json.decode((tmp_path / "gate.json").read_bytes(), type=Study).seeds == (0,)
