"""A fidelity run's report is made from its folder's raw records alone; `test_kept_runs` has what it shows."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from fidelity_records import CONTROLS, probe
from pic_bench.environment import capture_environment
from pic_bench.fidelity.record import Probe, append_lines
from pic_bench.fidelity.report import headline, write_report
from pic_bench.out_folder import write_json

from sglang_pic.cli import main
from sglang_pic.errors import BenchError
from tests.unit.html_page import Page


def run_of(path: Path, probes: Iterable[Probe]) -> Path:
    append_lines(path / "probes.jsonl", probes)
    return path


def report_of(path: Path, probes: Iterable[Probe]) -> str:
    write_report(run_of(path, probes))
    return (path / "report.md").read_text("utf8")


def test_the_page_is_one_file_and_well_formed(tmp_path: Path) -> None:
    config = {"model": "models/tiny & small", "dtypes": ["float32"], "min_chunk_hit": 256, "policies": ["default"]}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    write_json(tmp_path / "environment.json", msgspec.structs.replace(capture_environment(), cpu="A <CPU>"))
    (tmp_path / "left_out.jsonl").write_text('{"experiment":"grid","dtype":"float32","prompt":"g","reason":"r"}\n{"exp')
    written = report_of(tmp_path, [probe(num_blocks=n, text="the box holds a `seam-1` <b>") for n in (1, 4)])
    assert "grid, float32: 1 prompt not spliced as meant" in written
    text = (tmp_path / "report.html").read_text("utf8")
    page = Page(text)
    assert page.fetched == []
    assert "url(" not in text
    words = " ".join(page.words)
    assert all(said in words for said in ("Fidelity of tiny & small", "A <CPU>", "the box holds a `seam-1` <b>"))
    for name in set(re.findall(r"var\(--([a-z0-9-]+)\)", text)):
        assert text.count(f"--{name}:") == 2, f"--{name} is not defined for light and dark"


def test_what_the_figures_rest_on_is_said(tmp_path: Path) -> None:
    probes = [probe(prompt=f"p{i}", top1_probability=0.1, text="a\n````\n## no heading") for i in range(3)]
    written = report_of(tmp_path, [*probes, probe(arm="exact", prompt="p0", kl=0.0), probes[1]])
    assert "In 1 cell up to 2 prompts measured in one of arm and floor only" in written
    assert "(2 not paired)" in written
    assert "1 record measured again" in written
    assert "The smallest cell has n = 1" in written
    assert "†: the full prefill itself is not competent here" in written
    marks = {row.split()[1]: "100 %† |" in row for row in written.splitlines() if "100 %" in row}
    assert marks == {"exact": False, "seam": True}, "only where the full prefill is undecided"
    assert "\n`````text\na\n````\n## no heading\n`````\n" in written, "the text of a prompt cannot end its fence"


def test_controls_alone_make_a_report(tmp_path: Path) -> None:
    summary = write_report(run_of(tmp_path, [probe(arm=arm, num_blocks=n, kl=0.0) for arm in CONTROLS for n in (1, 2)]))
    assert (summary.comparisons, summary.worst, [*tmp_path.glob("*.svg")]) == ([], [], [])
    assert "What a setting changes" not in (tmp_path / "report.md").read_text("utf8")
    assert "exact" in headline(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("probes.jsonl", b"", "nothing was measured"),
        ("probes.jsonl", b'{"kl": 1}\n', "no records of a fidelity run"),
        ("probes.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "no records of a fidelity run .*cannot be unpacked"),
        ("config.json", b"[]", "not a run's settings"),
    ],
)
def test_a_broken_folder_is_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    run_of(tmp_path, [probe()])
    if name.endswith(".gz"):
        (tmp_path / "probes.jsonl").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BenchError, match=says):
        write_report(tmp_path)


def test_the_verb_reports_a_fidelity_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, [probe(prompt=f"p{i}") for i in range(3)])
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{headline(tmp_path)}\nReport: {tmp_path / 'report.html'}\n"
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == (tmp_path / "summary.json").read_text("utf8")
