"""Reports of kept runs are what their records give: every figure, table, word and drawing, on real records.

Where a report is changed on purpose, `sglang-pic report bench/results/NAME` writes it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pic_bench.compare.report import write_all
from pic_bench.fidelity.report import headline, write_report
from pic_bench.tune.report import write_report as write_tune
from pic_traces.errors import ReplayError

from sglang_pic.cli import main
from tests.unit.html_page import Page

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
KEPT: dict[str, Callable[[Path], object]] = {
    "demo": write_all,
    "demo-opendevin-sample": write_all,
    "off-equals-stock": write_all,
    "fidelity-edits": write_report,
    "fidelity-grid": write_report,
    "fidelity-opendevin-defaults": write_report,
    "fidelity-qa": write_report,
    "tune-miniswe-clock": write_tune,
}


def pages(folder: Path) -> dict[str, str]:
    """The pages and drawings of a run."""
    found = (path for path in folder.rglob("*") if path.suffix in (".md", ".svg"))
    return {str(path.relative_to(folder)): path.read_text("utf8") for path in found}


@pytest.mark.parametrize("name", KEPT)
def test_a_report_is_made_again_alike_and_leaves_no_old_picture(name: str, tmp_path: Path) -> None:
    folder, kept = tmp_path / name, pages(RESULTS / name)
    shutil.copytree(RESULTS / name, folder)
    for page in kept:
        (folder / page).unlink()
    if name.startswith("fidelity"):
        (folder / "plot-of-an-earlier-report.svg").write_text("")
    KEPT[name](folder)
    assert kept
    assert pages(folder) == kept
    if name == "fidelity-grid":
        shown = headline(folder)
        assert "grid, float32, musique_hipporag.jsonl.gz, donors alone, runs: 16" in shown
        assert "runs: 8" not in shown, "the largest place only"


def test_several_scenes_have_one_page_and_six_lines_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(RESULTS / "demo", folder)
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["clock:sample:agents", "sample:agents"]
    assert [line.split()[0] for line in lines[1:4]] == ["Tokens", "TTFT", "Same"]
    assert "approximate" in lines[4]
    assert lines[5:] == [f"Report: {folder / 'report.html'}"]
    assert Page((folder / "report.html").read_text("utf8")).fetched == [
        "clock-sample-agents/report.html",
        "sample-agents/report.html",
    ]
    assert main(["report", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == (folder / "summary.json").read_text("utf8")
    packed = folder / "sample-agents" / "arms" / "pic" / "requests.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ReplayError, match=r"requests\.jsonl\.gz cannot be unpacked"):
        write_all(folder)
