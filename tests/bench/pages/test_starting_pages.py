"""`MODELS.md` and `COMMANDS.md` are what `make recipes` writes today."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from pic_bench.pages.starts import PAGES

from tests.conftest import ROOT


def _write(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PAGES[name]()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """All pages, from a process in which SGLang has not yet looked for its platform."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return dict(zip(PAGES, executor.map(_write, PAGES, timeout=280), strict=True))


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_current(name: str, pages: dict[str, str]) -> None:
    assert pages[name] == (ROOT / "sglang_pic" / name).read_text(), "run `make recipes`"
    assert "SGLang itself" not in pages[name], "flags that SGLang refuses without the plugin too"


def cells(page: str) -> list[list[str]]:
    """Of each line of the page's tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]


def test_every_family_counts_once(pages: dict[str, str]) -> None:
    rows = cells(pages["MODELS.md"])
    shares = [
        [float(cell.removesuffix(" %")) for cell in row[1:]] for row in rows if row[0] in ("H100", "H200", "B200")
    ]
    assert [sum(share) for share in shares] == pytest.approx([100] * 3, abs=0.2)
    assert sum(len(row) == 6 for row in rows) > 40


def test_every_command_names_the_backend(pages: dict[str, str]) -> None:
    """Whoever writes it has asked of each command whether start-up would refuse it."""
    page = pages["COMMANDS.md"]
    lines = [line for line in page.splitlines() if line.startswith("$ ")]
    assert len(lines) == page.count("\n## ") - 1 > 10
    assert all(" --radix-cache-backend pic" in line for line in lines)
    assert len(lines) + len(cells(page)[2:]) > 30


def test_readme_counts_recipes_as_their_page_does() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("sglang_pic/MODELS.md", "README.md"))
    counts = re.search(r"^\| splices \| (\d+) .*?\| (\d+) ", page, re.MULTILINE)
    assert counts is not None
    assert f"{counts[1]} of 92 public recipes" in readme
    assert f"{counts[2]} of 37 for agents" in readme
