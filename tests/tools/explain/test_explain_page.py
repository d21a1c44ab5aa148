"""The page of `explain` in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_pic.explain.grouping import Findings
from sglang_pic.explain.page import html_page
from tests.helpers.explain_browser import Page, find_browser, open_browser
from tests.helpers.explain_fakes import BODY, call_of, chat, serve

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("websocket", reason="websocket-client is not installed here")
    with open_browser(BROWSER, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.mark.parametrize("width", [390, 1600])
def test_nothing_is_wider_than_the_screen_and_places_open(page: Page, tmp_path: Path, width: int) -> None:
    name = "a-very-long-name-of-a-session" * 12
    texts = [chat(f"mode {number}.\n{BODY}", "x" * 300) for number in range(3)]
    findings = Findings()
    for outcome in serve(call_of(each, session=name, index=at, agent="agent" * 30) for at, each in enumerate(texts)):
        findings.add(outcome)
    path = tmp_path / "page.html"
    path.write_text(html_page(findings, name, "words", is_exact=False), encoding="utf8")
    page.open(path, width=width, height=800, dark=True)
    assert page.complaints() == []
    assert page.requests() == [path.as_uri()]
    shown = "document.querySelectorAll('details.place > .who').length"
    assert page.run(shown) == 2
    page.run("document.querySelector('details.place summary').click()")
    page.frame()
    assert page.run("document.querySelector('details.place > .bar').getBoundingClientRect().height") > 0
    assert page.run("document.documentElement.scrollWidth") == width
