"""A comparison's report renders whatever its arms are; `test_kept_runs` has what it shows of real records."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pic_bench.compare.report import write_all
from pic_bench.compare.run_folder import Run
from pic_bench.report.study import RESULTS

from sglang_pic.errors import BenchError
from tests.unit.html_page import Page

KEPT = RESULTS / "demo-opendevin-sample"


def report(folder: Path, *arms: str, name: str = "a trace") -> Run:
    """The report of a kept comparison whose arms are of these kinds: `pic` as it was, all others as stock was."""
    shutil.copytree(KEPT, folder, ignore=shutil.ignore_patterns("arms"), dirs_exist_ok=True)
    summary = json.loads((KEPT / "summary.json").read_text())
    measured = {arm: "pic" if arm == "pic" else "stock" for arm in arms}
    for arm, source in measured.items():
        shutil.copytree(KEPT / "arms" / source, folder / "arms" / arm)
    summary["arms"] = {arm: {**summary["arms"][source], "kind": arm} for arm, source in measured.items()}
    summary["trace"]["name"] = name
    (folder / "summary.json").write_text(json.dumps(summary))
    (run,) = write_all(folder)
    return run


def test_page_and_drawing_are_self_contained_and_well_formed(tmp_path: Path) -> None:
    report(tmp_path, "stock", "pic", name="opendevin <sample>")
    text = (tmp_path / "report.html").read_text("utf8")
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 1
    assert not re.search(r"url\(|@import", text)
    assert "<sample>" not in text, "the trace's name must be escaped"
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(drawing)
    alone = ET.fromstring((tmp_path / "report.svg").read_text("utf8"))
    assert "prefers-color-scheme" in (alone.find("{http://www.w3.org/2000/svg}style").text or "")  # type: ignore[union-attr]


@pytest.mark.parametrize("arms", [("stock",), ("stock", "pic-off"), ("stock", "stock-again")])
def test_every_choice_of_arms_renders(tmp_path: Path, arms: tuple[str, ...]) -> None:
    report(tmp_path, *arms)
    text = (tmp_path / "report.md").read_text("utf8")
    assert ("The noise floor was not measured" in text) == ("stock-again" not in arms)


def test_arms_are_compared_with_stock_and_the_floor_is_stock_without_a_cache(tmp_path: Path) -> None:
    others = ("pic", "stock-again", "stock-cold")
    summary = report(tmp_path, others[0], "stock", *others[1:]).summary
    assert [(pair.baseline, pair.arm) for pair in summary.comparisons] == [("stock", arm) for arm in others]
    assert summary.paired == summary.comparisons[0]
    assert summary.floor == summary.comparisons[2]


def test_a_run_without_answers_renders(tmp_path: Path) -> None:
    """A trace whose every prompt is too long still ends with a report that says so."""
    report(tmp_path, "stock", "pic")
    for packed in tmp_path.glob("arms/*/requests.jsonl.gz"):
        packed.unlink()
        packed.with_suffix("").write_bytes(b"")
    write_all(tmp_path)
    assert "there is nothing to compare" in (tmp_path / "report.md").read_text("utf8")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="sglang-pic compare --out"):
        write_all(tmp_path)
