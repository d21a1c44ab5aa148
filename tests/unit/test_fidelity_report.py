"""A fidelity run's report is made from its folder's raw records alone, and shows what was measured and nothing else."""

from __future__ import annotations

import gzip
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from fidelity_records import CONTROLS, grid, probe, questions, shifts, trace
from pic_bench.environment import capture_environment
from pic_bench.fidelity import tables
from pic_bench.fidelity.pictures import RECOVERY, Curve, plot
from pic_bench.fidelity.record import Experiment, Probe, append_lines
from pic_bench.fidelity.report import headline, write_report
from pic_bench.fidelity.summary import Summary
from pic_bench.out_folder import write_json
from pic_bench.report.numbers import change, divergence, share, tick, two, with_interval
from pic_bench.report.stats import Estimate

from sglang_pic.cli import main
from sglang_pic.errors import BenchError
from tests.unit.html_page import Page

MAKERS = {Experiment.GRID: grid, Experiment.SHIFT: shifts, Experiment.QA: questions, Experiment.TRACE: trace}
TITLES = {one: f"## {tables.TITLES[one.value]}" for one in MAKERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every experiment, with its report."""
    path = tmp_path_factory.mktemp("run")
    probes = [*grid(prompts=21, blocks=(1, 4, 16)), *shifts(prompts=8), *questions(prompts=22), *trace(calls=45)]
    append_lines(path / "probes.jsonl", probes)
    config = {"model": "models/tiny & small", "dtypes": ["float32"], "data": None, "sizes": {"blocks": [1, 4, 16]}}
    config |= {"min_chunk_hit": 256, "policies": ["default=tail:0", "seam-8"]}
    (path / "config.json").write_bytes(msgspec.json.encode(config))
    write_json(path / "environment.json", msgspec.structs.replace(capture_environment(), cpu="A <CPU>"))
    (path / "left_out.jsonl").write_text('{"experiment":"grid","dtype":"float32","prompt":"g","reason":"r"}\n{"exp')
    write_report(path)
    return path


@pytest.fixture(scope="module")
def summary(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)


@pytest.fixture(scope="module")
def markdown(folder: Path) -> str:
    return (folder / "report.md").read_text("utf8")


def run_of(path: Path, probes: Iterable[Probe]) -> Path:
    append_lines(path / "probes.jsonl", probes)
    return path


def report_of(path: Path, probes: Iterable[Probe]) -> str:
    write_report(run_of(path, probes))
    return (path / "report.md").read_text("utf8")


def assert_themed(text: str) -> None:
    for name in set(re.findall(r"var\(--([a-z0-9-]+)\)", text)):
        assert text.count(f"--{name}:") == 2, f"--{name} is not defined for light and dark"


def test_the_page_is_one_file_and_well_formed(folder: Path) -> None:
    text = (folder / "report.html").read_text("utf8")
    page = Page(text)
    assert page.fetched == []
    assert "url(" not in text
    words = " ".join(page.words)
    assert "Fidelity of tiny & small" in words
    assert "A <CPU>" in words
    assert "the red box holds a `seam-1` <b>" in words
    assert "under <code>default</code>." in text
    assert_themed(text)


def test_both_outputs_have_the_same_parts_and_tables(folder: Path, summary: Summary, markdown: str) -> None:
    page = (folder / "report.html").read_text("utf8")
    words = "".join(Page(page).words)
    others = ("What a setting changes", "Prompts that moved furthest", "Limits", "Words")
    titles = [*TITLES.values(), *(f"## {title}" for title in others)]
    assert all(title in markdown and title.removeprefix("## ") in words for title in titles)
    for one in summary.comparisons:
        for shown in (one.what, one.where, with_interval(one.difference, change)):
            assert shown in markdown
            assert shown in words
    for cell in summary.cells:
        if cell.arm != "full":
            assert with_interval(cell.kl, divergence) in markdown
            assert with_interval(cell.top1, share) in markdown
    assert markdown.count("\n| --- ") + markdown.count("\n| ----") == page.count("<table>")


def test_every_table_names_n_and_has_the_floor(markdown: str) -> None:
    tables = re.findall(r"(?:^\|.*\n?)+", markdown, re.MULTILINE)
    assert len(tables) >= 15
    for table in tables:
        head = table.splitlines()[0]
        assert re.search(r"\| +n \|", head)
        assert "exact hit (noise floor)" in table or head.startswith("| mean KL of")
        assert len({line.count(" | ") for line in table.splitlines()}) == 1
    assert sum("naive (not rotated)" in table for table in tables) >= len(tables) - 3


def test_pictures_lie_beside_the_report(folder: Path, markdown: str) -> None:
    named = set(re.findall(r"!\[[^\]]+\]\(([^ )]+)", markdown))
    assert named == {path.name for path in folder.glob("*.svg")}
    kinds = ("kl-by-runs", "kl-by-positions-moved", "kl-by-cost")
    assert all(any(name.startswith(f"plot-{kind}") for name in named) for kind in kinds)
    for name in named:
        text = (folder / name).read_text("utf8")
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in text
        assert "inf" not in text.replace("infinite", "")
    assert (folder / "report.html").read_text("utf8").count("<svg") == len(named)


def test_a_report_is_made_again_alike_and_leaves_no_old_picture(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "plot-of-an-earlier-report.svg").write_text("")
    write_report(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_prompts_that_moved_furthest(summary: Summary) -> None:
    for experiment in MAKERS:
        worst = [one for one in summary.worst if one.experiment is experiment]
        assert [one.kl for one in worst] == sorted((one.kl for one in worst), reverse=True)
        assert len({one.prompt for one in worst}) == len(worst) == 8
        arm = "seam-1" if experiment in (Experiment.GRID, Experiment.SHIFT) else "default"
        assert {one.arm for one in worst} == {arm}
    grids = [p for p in grid(prompts=21, blocks=(1, 4, 16)) if p.arm == "seam-1"]
    assert summary.worst[0].kl == max(p.kl for p in grids)


def test_settings_and_what_was_left_out_are_said(markdown: str) -> None:
    measured = markdown.partition("## How it was measured")[2].splitlines()
    assert "- **sizes**: {blocks:[1,4,16]}" in measured
    assert "- **dtypes**: float32" in measured
    assert not any("data" in line.partition(":")[0] for line in measured)
    assert "grid, float32: 1 prompt not spliced as meant" in markdown
    assert "chunk-hit tokens under `default`." in markdown


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


@pytest.mark.parametrize("experiment", MAKERS, ids=lambda experiment: experiment.value)
def test_parts_without_records_are_left_out(experiment: Experiment, tmp_path: Path) -> None:
    written = report_of(tmp_path, islice(MAKERS[experiment](), 400))
    assert [title for title in TITLES.values() if title in written] == [TITLES[experiment]]
    assert "an unnamed model" in written
    Page((tmp_path / "report.html").read_text("utf8"))


def test_controls_alone_make_a_report(tmp_path: Path) -> None:
    summary = write_report(run_of(tmp_path, [probe(arm=arm, num_blocks=n, kl=0.0) for arm in CONTROLS for n in (1, 2)]))
    assert (summary.comparisons, summary.worst, [*tmp_path.glob("*.svg")]) == ([], [], [])
    assert "What a setting changes" not in (tmp_path / "report.md").read_text("utf8")
    assert "exact" in headline(tmp_path)


def test_records_may_be_packed_and_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    plain = run_of(tmp_path, [probe(prompt=f"p{i}") for i in range(3)]) / "probes.jsonl"
    whole = plain.read_bytes()
    plain.write_bytes(whole[:-20])
    assert write_report(tmp_path).probes == 2
    (tmp_path / "probes.jsonl.gz").write_bytes(gzip.compress(whole))
    plain.unlink()
    assert write_report(tmp_path).probes == 3


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("probes.jsonl", b"", "nothing was measured"),
        ("probes.jsonl", b'{"kl": 1}\n', "no records of a fidelity run"),
        ("probes.jsonl.gz", b"no archive", "no records of a fidelity run .Not a gzipped file"),
        ("probes.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "no records of a fidelity run .*cannot be unpacked"),
        ("config.json", b"[]", "not a run's settings"),
        ("environment.json", b"{}", "not the environment of a run"),
        ("left_out.jsonl", b"{}\n", "not a list of prompts that were left out"),
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


def test_the_terminal_shows_the_largest_place_of_each_experiment(folder: Path) -> None:
    text = headline(folder)
    assert "grid, float32, sample, donors alone, runs: 16" in text
    assert "runs: 4" not in text
    assert "positions moved: 4,096" in text
    assert "seam-8-min-128" in text
    assert not re.search(r"seam-(2|4|16) \|", text)


def test_figures_are_short() -> None:
    divergences = {0.0: "0", 1.04e-12: "1.0e-12", 9.4e-4: "9.4e-4", 0.00314: ".0031", -0.0031: "-.0031"}
    divergences |= {0.5: ".50", 0.996: "1.00", 1.236: "1.24"}
    assert {value: divergence(value) for value in divergences} == divergences
    assert [two(value) for value in (0.996, 0.98, 0, -0.05, 1.5)] == ["1.00", ".98", ".00", "-.05", "1.50"]
    assert [tick(value) for value in (1e-5, 3e-4, 0.001, 0.02, 0.5, 2)] == ["1e-5", "3e-4", ".001", ".02", ".5", "2"]
    assert with_interval(Estimate(value=0.975, low=0.9, high=1.0, n=4), share) == "97.5 % [90.0, 100]"
    assert with_interval(Estimate(value=0.5, low=0.5, high=0.5, n=4), share) == "50.0 %"
    assert with_interval(None, share) == "-"


def kl(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=9)


def marks(drawing: str) -> dict[str, tuple[float, float]]:
    """Where the marks with a tooltip stand, by the tooltip's first words."""
    found = re.findall(r'<use [^>]*x="([0-9.]+)" y="([0-9.]+)"[^>]*><title>([^:]+):', drawing)
    return {name: (float(x), float(y)) for x, y, name in found}


def test_what_is_five_decades_lower_stands_at_the_foot() -> None:
    series = [Curve("seam 1", [(0, kl(0.02, 0.01, 0.03)), (1, kl(0.0, 0.0, 0.0)), (2, kl(1e-12, 0.0, 1e-12))])]
    drawing = plot("x", series, {"floor": kl(1e-12, 1e-12, 1e-12)}, "x", slots=["a", "b", "c"]).inline()
    at = marks(drawing)
    lowest = float(re.findall(r'y="([0-9.]+)">.01<', drawing)[-1])
    # Lower on the page is larger.
    assert at["seam 1, a"][1] < lowest < at["seam 1, b"][1] == at["seam 1, c"][1]
    assert ">floor: 1.0e-12</text>" in drawing
    assert "<title>seam 1, c: 1.0e-12 [0, 1.0e-12], n = 9</title>" in drawing
    zero = kl(0.0, 0.0, 0.0)
    nothing = plot("x", [Curve("a", [(0, zero)])], {"floor": zero}, "x", slots=["a"]).inline()
    ET.fromstring(nothing)
    assert "nan" not in nothing


def test_larger_values_stand_higher_and_to_the_right_and_say_their_figures() -> None:
    points = {"cheap": (0.3, kl(0.9, 0.85, 0.95)), "dear $b$": (0.8, kl(0.97, 0.95, 1.0))}
    series = [Curve(name, [point], "none") for name, point in points.items()]
    drawn = plot("x", series, {}, "x", y_title=RECOVERY)
    inline, alone = drawn.inline(), drawn.standalone("A title", "<about>")
    cheap, dear = marks(inline).values()
    assert cheap[0] < dear[0]
    assert cheap[1] > dear[1]
    assert "<title>cheap, 30.0% computed: .90 [.85, .95], n = 9</title>" in inline
    # Each has its name in the legend, as it is; colours are the theme's.
    assert all(f">{name}</text>" in inline for name in (*points, RECOVERY))
    assert re.findall(r"#[0-9a-f]{6}", inline) == []
    ET.fromstring(alone)
    assert_themed(alone)
