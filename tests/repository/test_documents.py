"""The documents: the reference is what the code says, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch", reason="the tables of what is supported read the kernels' pools")
from pic_bench.compare.run_folder import load_scenes
from pic_bench.pages.reference import CLI, OPERATE, PAGE, render
from pic_bench.report import frontier, study
from pic_bench.report.markdown import Table, markdown_table
from pic_bench.report.numbers import percent, seconds, times

from tests.conftest import ROOT


@pytest.mark.parametrize("path", [PAGE, OPERATE, CLI], ids=lambda path: path.name)
def test_generated_tables_are_up_to_date(path: Path) -> None:
    page = path.read_text()
    assert render(page) == page, "run `make reference`"


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 1150), ("sglang_pic/README.md", 1600), ("sglang_pic/OPERATE.md", 1100)]
)
def test_pages_that_everybody_reads_are_short(page: str, most: int) -> None:
    """Figures with their conditions belong into the study, lists into the reference."""
    assert len((ROOT / page).read_text().split()) <= most


@pytest.mark.parametrize("path", sorted(study.PAGES.glob("*.md")), ids=lambda path: path.name)
def test_tables_of_the_study_are_what_the_records_say(path: Path) -> None:
    page = path.read_text()
    assert study.render(page) == page, "run `make study`"


def test_the_frontier_is_what_the_records_say() -> None:
    drawn = study.FRONTIER.read_text(encoding="utf8")
    assert frontier.picture(frontier.read(study.RESULTS)) == drawn, "run `make study`"
    for panel in frontier.PANELS:
        assert panel.title in drawn
    ElementTree.fromstring(drawn)


def test_every_table_of_the_study_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text() for page in study.PAGES.glob("*.md"))
    shown = re.findall(r"<!-- generated: ([a-z0-9-]+) -->", pages)
    assert sorted(shown) == sorted(study.TABLES)


def test_the_study_stays_short() -> None:
    words = re.findall(r"\S*\w\S*", " ".join(page.read_text() for page in study.PAGES.glob("*.md")))
    assert len(words) <= 8_000


def test_the_readme_shows_what_the_demo_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- demo: begin -->\n(.*?)<!-- demo: end -->", readme, re.DOTALL)
    assert block is not None
    assert block[1].strip() == markdown_table(demo_table(ROOT / "bench" / "results" / "demo")).strip()


def demo_table(folder: Path) -> Table:
    """Two rows a scene: stock, and the patched server with the defaults."""
    header = ["calls", "server", "tokens computed", "median TTFT", "first token as stock's"]
    table = Table(header, [])
    for name, run in load_scenes(folder).items():
        paired = run.summary.paired
        assert paired is not None
        later = paired.from_second_call
        stock, patched = (run.summary.arms[arm].computed_tokens for arm in (paired.baseline, paired.arm))
        label = "behind a clock" if name.startswith("clock") else "as recorded"
        table.rows.append([label, "stock", f"{stock:,}", seconds(later.baseline_ttft_p50_s), ""])
        computed = f"{patched:,} ({percent(paired.computed_tokens_ratio)})"
        ttft = f"{seconds(later.ttft_p50_s)} ({times(later.ttft_speedup_p50)} faster)"
        table.rows.append(["", "sglang_pic", computed, ttft, percent(paired.first_token_agreement)])
    return table
