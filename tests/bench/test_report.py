"""Reports: of kept runs they are what the records give, and any run's renders from its folder alone."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pic_bench.compare.report import write_all
from pic_bench.compare.run_folder import Run
from pic_bench.environment import capture_environment
from pic_bench.fidelity.record import Probe, append_lines
from pic_bench.fidelity.report import headline, write_report
from pic_bench.out_folder import write_json
from pic_bench.report.study import RESULTS
from pic_traces.errors import ReplayError

from sglang_pic.cli import main
from sglang_pic.errors import BenchError
from tests.helpers.fidelity_records import probe


class Page(HTMLParser):
    """Collects the tags, the text and what would be fetched, and fails where elements do not close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []
        assert "script" not in self.tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        links = [value or "" for name, value in attrs if name in {"src", "href", "data", "srcset"}]
        self.fetched += [link for link in links if not link.startswith("#")]
        self._open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


KEPT: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("demo", "demo-opendevin-sample", "off-equals-stock"), write_all),
    "fidelity-opendevin-defaults": write_report,
}


def summaries(folder: Path) -> dict[str, object]:
    """What the summaries of a run say, by their place; the last digits depend on a machine's sums."""
    found = folder.rglob("summary.json")
    read = partial(json.loads, parse_float=lambda text: f"{float(text):.12g}")
    return {str(path.relative_to(folder)): read(path.read_text()) for path in found}


@pytest.mark.parametrize("name", KEPT)
def test_the_figures_of_a_kept_run_are_made_again_from_its_records(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder)
    KEPT[name](folder)
    assert summaries(folder) == summaries(RESULTS / name)
    Page((folder / "report.html").read_text("utf8"))


def test_several_scenes_have_one_page_and_six_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(RESULTS / "demo", folder)
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["clock:sample:agents", "sample:agents"]
    assert [line.split()[0] for line in lines[1:4]] == ["Tokens", "TTFT", "Same"]
    assert "approximate" in lines[4]
    assert lines[5:] == [f"Report: {folder / 'report.html'}"]
    scenes = ["clock-sample-agents/report.html", "sample-agents/report.html"]
    assert Page((folder / "report.html").read_text("utf8")).fetched == scenes
    assert main(["report", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == (folder / "summary.json").read_text("utf8")
    packed = folder / "sample-agents" / "arms" / "pic" / "requests.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ReplayError, match=r"requests\.jsonl\.gz cannot be unpacked"):
        write_all(folder)


SAMPLE = RESULTS / "demo-opendevin-sample"


def report(folder: Path, *arms: str, name: str = "a trace") -> Run:
    """The report of a kept comparison whose arms are of these kinds: `pic` as it was, all others as stock was."""
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("arms"), dirs_exist_ok=True)
    summary = json.loads((SAMPLE / "summary.json").read_text())
    measured = {arm: "pic" if arm == "pic" else "stock" for arm in arms}
    for arm, source in measured.items():
        shutil.copytree(SAMPLE / "arms" / source, folder / "arms" / arm)
    summary["arms"] = {arm: {**summary["arms"][source], "kind": arm} for arm, source in measured.items()}
    summary["trace"]["name"] = name
    (folder / "summary.json").write_text(json.dumps(summary))
    (run,) = write_all(folder)
    return run


def test_text_of_logs_makes_no_link_and_no_markup(tmp_path: Path) -> None:
    evil = "x\r\n\r\n![p](http://evil/a.png) [l](http://evil) <s>\x1b[2J\n\n[r]: http://evil\n\n![r][r]"
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    for arm in ("stock", "pic"):
        (packed,) = (tmp_path / "arms" / arm).glob("requests.jsonl.gz")
        records = [json.loads(line) for line in gzip.decompress(packed.read_bytes()).splitlines()]
        text = "\n".join(json.dumps({**each, "session_id": evil + each["session_id"]}) for each in records)
        packed.write_bytes(gzip.compress(text.encode() + b"\n"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["trace"]["name"] = evil
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_all(tmp_path)
    text = (tmp_path / "report.html").read_text("utf8")
    assert text.count("evil") > 2
    assert not re.search("<(img|s>|a )", text)
    assert """Content-Security-Policy" content="default-src 'none'""" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "hush"],
        ["--api-key=hush", "x"],
        ["--server-arg", "--admin-api-key hush --tp 2"],
        ["--server-arg=--api-key=hush"],
        ["--server-arg=--api-key", "--server-arg=hush"],
        ["--server-arg", "--ssl-keyfile-password 'hush hush'"],
    ],
)
def test_secrets_of_servers_reach_no_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "config.json", {"server_args": words, "in": [{"of": words}], "kept": ["--max-tokens", "5"]})
    monkeypatch.setattr(sys, "argv", ["sglang-pic", "compare", *words])
    monkeypatch.setenv("SGLANG_API_KEY", "hush")
    write_json(tmp_path / "environment.json", capture_environment())
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "hush" not in text
    assert all(kept in text for kept in ("--max-tokens", '"5"', "***", words[0].partition("=")[0]))


def test_a_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    report(tmp_path, "stock", "pic", name="opendevin <sample>")
    text = (tmp_path / "report.html").read_text("utf8")
    page = Page(text)
    assert page.fetched == []
    assert not re.search(r"url\(|@import", text)
    assert "<sample>" not in text, "the trace's name must be escaped"


def test_arms_are_compared_with_stock_and_the_floor_is_stock_without_a_cache(tmp_path: Path) -> None:
    others = ("pic", "stock-again", "stock-cold")
    summary = report(tmp_path, others[0], "stock", *others[1:]).summary
    assert [(pair.baseline, pair.arm) for pair in summary.comparisons] == [("stock", arm) for arm in others]
    assert summary.paired == summary.comparisons[0]
    assert summary.floor == summary.comparisons[2]


def test_stock_without_a_cache_is_never_what_stock_computes(tmp_path: Path) -> None:
    """Beside it every cache would look good, prefix hits alone too."""
    summary = report(tmp_path / "three", "stock-cold", "stock", "pic").summary
    assert (summary.paired, summary.noise_floor) == (summary.comparisons[1], "stock-cold")
    assert {pair.baseline for pair in summary.comparisons} == {"stock"}
    for number, arms in enumerate((("stock-cold", "pic"), ("pic", "stock-cold"))):
        summary = report(tmp_path / f"{number}", *arms).summary
        assert (summary.paired, summary.noise_floor, len(summary.comparisons)) == (None, None, 1)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="sglang-pic compare --out"):
        write_all(tmp_path)


def run_of(path: Path, probes: Iterable[Probe]) -> Path:
    append_lines(path / "probes.jsonl", probes)
    return path


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("probes.jsonl", b"", "nothing was measured"),
        ("probes.jsonl", b'{"kl": 1}\n', "no records that this"),
        ("probes.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "no records that this .*cannot be unpacked"),
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
