"""The companion: its figures are the records', and a reader can reach all of them without a mouse or a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pytest
from pic_replay.records import load_records

from tests.helpers.explain_browser import Page, find_browser, open_browser

pytest.importorskip("torch", reason="the model's folder is written with torch")
from pic_bench.companion.__main__ import Payload, html_page, read_payload
from pic_bench.companion.snippets import ELLIPSIS, SnippetPool, quote
from pic_bench.report.study import RESULTS

BROWSER = find_browser()
MAX_BYTES = 2_000_000


@pytest.fixture(scope="module")
def payload(model_dir: Callable[[str], Path]) -> Payload:
    return read_payload(model_dir("smollm2"))


@pytest.fixture(scope="module")
def page(payload: Payload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("websocket", reason="websocket-client is not installed here")
    if BROWSER is None:
        pytest.skip("no Chromium on PATH")
    folder = tmp_path_factory.mktemp("companion")
    (folder / "page.html").write_text(html_page(payload), encoding="utf8")
    with open_browser(BROWSER, folder / "profile") as page:
        page.open(folder / "page.html", width=390)
        yield page


def test_calls_have_the_servers_lengths_and_their_pieces_add_up(payload: Payload) -> None:
    for scene in payload.scenes:
        records = [each for each in load_records(RESULTS / scene.record / "arms" / "pic") if not each.warmup]
        recorded = [
            (each.session_id, each.call, each.prompt_tokens, each.prefix_hit_tokens, each.chunk_hit_tokens)
            for each in records
        ]
        calls = [(each.session, each.index, each.prompt_len, each.prefix_len, each.moved_len) for each in scene.calls]
        assert sorted(recorded) == sorted(calls)
        drawn = [call for call in scene.calls if call.pieces]
        assert len(drawn) > len(scene.calls) / 2
        for call in drawn:
            starts = [0, *(piece.end for piece in call.pieces)]
            lengths = [(piece.kind, piece.end - start) for piece, start in zip(call.pieces, starts, strict=False)]
            assert min(length for _, length in lengths) > 0
            assert starts[-1] == call.prompt_len
            assert sum(length for kind, length in lengths if kind == "prefix") == call.prefix_len
            assert sum(length for kind, length in lengths if kind == "moved") == call.moved_len


def test_every_dial_has_the_default_among_several_values(payload: Payload) -> None:
    assert [dial.name for dial in payload.dials] == ["seam", "tail", "edit"]
    for dial in payload.dials:
        for series in dial.series:
            assert len(series.stops) >= 3, series.title
            assert sum("default" in stop.label for stop in series.stops) == 1, series.title
            assert (RESULTS / series.record).is_file()
            assert all(0 <= stop.spliced <= 1 for stop in series.stops)


def test_recovery_of_the_prompts_is_the_summarys(payload: Payload) -> None:
    """The prompts that are shown are those that the study counts, each with its own record."""
    for number, (_, name) in enumerate(payload.edits.formats):
        cells = json.loads((RESULTS / name / "summary.json").read_text())["cells"]
        for arm in ("in_place", "notes"):
            (cell,) = (cell for cell in cells if (cell["group"], cell["arm"]) == ("all", arm))
            outcomes = [prompt.outcomes[number] for prompt in payload.edits.prompts]
            counted = [each[arm] for each in outcomes if arm in each and any(o.spliced for o in each.values())]
            told = [outcome.recovery for outcome in counted if outcome.recovery is not None]
            assert len(told) == cell["n"]
            assert fmean(told) == pytest.approx(cell["recovery"]["value"])


def test_the_page_is_small_asks_for_nothing_and_fits_a_narrow_window(payload: Payload, page: Page) -> None:
    assert len(html_page(payload).encode()) < MAX_BYTES
    assert page.complaints() == []
    assert len(page.requests()) == 1
    assert page.run("document.documentElement.dataset.state") == "ready"
    assert page.run("document.documentElement.scrollWidth") == 390


def test_sliders_and_pieces_answer_to_the_keyboard(payload: Payload, page: Page) -> None:
    def text(selector: str) -> str:
        return str(page.run(f"document.querySelector({selector!r}).textContent"))

    page.run("document.querySelector('#dial-edit input').focus()")
    page.press("ArrowRight")
    bold = payload.dials[2].series[0].stops[2]
    assert text("#dial-edit output") == bold.label == "in_place"
    assert f"{100 * bold.spliced:.1f}" in text("#dial-edit .figures")
    page.run("document.querySelector('.bar button[tabindex=\"0\"]').focus()")
    before = text("#piece p")
    page.press("ArrowLeft")
    assert text("#piece p") != before
    computed = text("#prompt")
    page.run("document.querySelector('#policy input[value=recompile]').click()")
    assert page.run("document.querySelectorAll('#prompt .moved').length") == 0
    assert text("#prompt") == computed
    assert "recompile" in text("#answer tr.chosen")


def test_quote_keeps_head_and_tail_and_a_pool_a_text_once() -> None:
    text = "abcdefghij" * 100
    quoted = quote(lambda start, end: text[4 * start : 4 * end], 0, len(text) // 4, 60)
    assert quoted == f"{text[:40]}{ELLIPSIS}{text[-20:]}"
    assert quote(lambda start, end: text[start:end], 5, 25, 60) == text[5:25]
    assert quote(lambda start, end: "long words " * (end - start), 0, 3, 20).count(ELLIPSIS) == 1
    pool = SnippetPool(max_bytes=5)
    assert [pool.add(text) for text in ("ab", "", "ab", "cde", "f", "ab")] == [1, 0, 1, 2, 0, 1]
    assert pool.num_refused == 1
