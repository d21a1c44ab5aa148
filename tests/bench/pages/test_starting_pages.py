"""`MODELS.md` is what `make recipes` writes today."""

from __future__ import annotations

import re
import warnings
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from pic_bench.pages import starts
from pic_bench.pages.families import load_families
from pic_bench.pages.old_flags import RENAMED, renewed

from tests.conftest import ROOT
from tests.helpers.flags_once import read_flags_once

CARDS = ("H100", "H200", "B200")


def _write() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return starts.page()


@pytest.fixture(scope="module")
def page() -> str:
    """From a process in which SGLang has not yet looked for its platform."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=read_flags_once) as executor:
        return executor.submit(_write).result(280)


def test_the_page_is_current(page: str) -> None:
    assert page == starts.FILE.read_text(), "run `make recipes`"
    assert "SGLang itself" not in page, "flags that SGLang refuses without the plugin too"


def test_every_family_counts_once(page: str) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    shares = [[float(cell.removesuffix(" %")) for cell in row[1:]] for row in rows if row[0] in CARDS]
    assert [sum(share) for share in shares] == pytest.approx([100] * 3, abs=0.2)
    listed = [name for line in re.findall(r"^- \*\*.+\*\*: (.+)$", page, re.MULTILINE) for name in line.split("; ")]
    assert sorted(re.sub(r" \(\S+ %\)$", "", name) for name in listed) == sorted(each.name for each in load_families())


def test_readme_counts_recipes_as_their_page_does() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("sglang_pic/MODELS.md", "README.md"))
    counts = re.search(r"^\| splices \| (\d+) .*?\| (\d+) ", page, re.MULTILINE)
    assert counts is not None
    assert f"{counts[1]} of 92 public recipes" in readme
    assert f"{counts[2]} of 37 for agents" in readme


def test_old_names_of_flags_are_not_sglangs() -> None:
    """And the new ones are."""
    # Not at the top: the process that writes the page imports this module, and looks for SGLang's platform itself.
    from sglang.srt import server_args

    parser = ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    assert known.isdisjoint(RENAMED)
    assert {new.split()[0] for new in RENAMED.values()} <= known
    assert renewed(["--attention-backend", "nsa", "--page-size", "64"]) == [
        *("--attention-backend", "dsa", "--page-size", "64")
    ]
