"""The page in a real browser: what is drawn, pointed at, clicked, filtered, and never taken for markup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explain_browser import Page, find_browser, open_browser
from explain_fakes import BODY, call_of, chat, prices, serve
from pic_traces import load
from pic_traces.encode import load_encoder
from pic_traces.session import Call

from sglang_pic.census.simulate import simulate
from sglang_pic.core import MOST_REUSE, CoreConfig
from sglang_pic.explain.cause import Cause
from sglang_pic.explain.data import BreakRow, CallRow, CauseRow, Figures, Payload, PayloadBuilder, SessionRow, SpanRow
from sglang_pic.explain.groups import Group
from sglang_pic.explain.page import html_page

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")

Folders = pytest.TempPathFactory
MANY = 10_000
# Of a view of 900 pixels, with what is kept above and below it.
MOST_ROWS = 80


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("websocket", reason="websocket-client is not installed here")
    with open_browser(BROWSER, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    encoder = load_encoder(None)
    builder = PayloadBuilder(36)
    for outcome in simulate([("sample", load("sample:opendevin"))], encoder, config=CoreConfig(edit="in_place")):
        builder.add(outcome)
    return write(tmp_path_factory, builder.build(encoder.name, is_exact=False), builder.figures)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 calls in 100 sessions, each with a break, two runs and texts; every tenth lost something."""
    calls = []
    for number in range(MANY):
        spans = [SpanRow(start=0, end=500, text=1)]
        if number > 1 and number % 10 == 0:
            spans += [
                SpanRow(start=500, end=510, text=1),
                SpanRow(start=510, end=900, text=3, shift=7, seam_len=1, donor=number - 1),
                SpanRow(start=900, end=950, text=2),
                SpanRow(start=950, end=960, text=3, shift=-3, seam_len=1, donor=number - 2),
            ]
        lengths = {"prompt_len": 2_000 + number % 900, "answer_len": 50, "prefix_len": 500}
        spans.append(SpanRow(start=spans[-1].end, end=lengths["prompt_len"], text=1))
        texts = {"before": 1, "old": 2, "new": 3, "after": 4}
        lost = 400 if len(spans) > 2 else 0
        found = BreakRow(group=number % 2, at=500, old_len=3, new_len=4, neighbor=number - 1, num_lost=lost, **texts)
        names = {"session": number // 100, "index": number % 100, "agent": number % 2}
        calls.append(CallRow(**names, **lengths, spans=spans, found=found if number else None))
    payload = Payload(
        **{"encoder": "words", "is_exact": True, "files": ["log.jsonl"], "agents": ["", "reviewer"]},
        sessions=[SessionRow(file=0, name=f"session-{number:03d}") for number in range(100)],
        causes=[CauseRow(key=key, label=key, advice="", groups=[group]) for group, key in enumerate(("clock", "id"))],
        groups=[
            Group(0, Cause.CLOCK, "Time:", MANY // 2 - 1, 400 * (MANY // 10 - 1), 10_000_000, 400, 10),
            Group(1, Cause.ID, "id:", MANY // 2, 0, 9_000_000, 0, 1),
        ],
        calls=calls,
        texts=["", "before", "10:31", "10:32", "after"],
        num_texts_left_out=0,
    )
    return write(tmp_path_factory, payload, Figures(prompt_tokens=sum(call.prompt_len for call in calls)))


def write(folders: pytest.TempPathFactory, payload: Payload, figures: Figures, title: str = "a test") -> Path:
    path = folders.mktemp("page") / "page.html"
    path.write_text(html_page(payload, figures, title))
    return path


def explain(folders: Folders, calls: list[Call], title: str = "a test", config: CoreConfig = MOST_REUSE) -> Path:
    builder = PayloadBuilder(len(calls))
    for outcome in serve(calls, config):
        builder.add(outcome)
    return write(folders, builder.build("words", is_exact=False), builder.figures, title)


def choose(page: Page, control: str, value: str) -> None:
    page.run(
        f"(() => {{ const node = document.getElementById('{control}'); node.value = '{value}';"
        " node.dispatchEvent(new Event('input')); })()"
    )
    page.frame()


def to_calls(page: Page) -> None:
    page.run("document.getElementById('bars').scrollIntoView()")
    page.frame()


def show(page: Page, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, **chosen: str) -> None:
    """Open a page, set its controls and scroll to the calls."""
    page.open(path, width=width, height=height, dark=dark)
    for control, value in chosen.items():
        choose(page, control, value)
    to_calls(page)


def rows(page: Page) -> list[str]:
    """The labels of the rows in the document, from top to bottom."""
    script = (
        "[...document.querySelectorAll('.row')]"
        ".sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)"
        ".map((row) => row.getAttribute('aria-label'))"
    )
    return list(page.run(script))


def place(page: Page, call: int, token: float) -> tuple[float, float]:
    """Where a token of a call's bar is drawn, while the whole width stands for `longest` tokens of all calls."""
    box = page.run(
        f"(() => {{ const row = document.getElementById('call-{call}');"
        " const box = row.querySelector('canvas').getBoundingClientRect();"
        " return [box.left, box.width, box.top, row.call.promptLen + row.call.answerLen]; })()"
    )
    return box[0] + box[1] * token / box[3], box[2] + 13


def colour_at(page: Page, call: int, token: float, *, y: int = 18) -> str:
    """What a call's bar has at a token, while every call has the full width."""
    script = """(() => {{
      const row = document.getElementById('call-{call}');
      const canvas = row.querySelector('canvas');
      const x = Math.floor(({token} / row.call.length) * canvas.width);
      const pixel = canvas.getContext('2d').getImageData(x, {y}, 1, 1).data;
      return '#' + [...pixel].slice(0, 3).map((part) => part.toString(16).padStart(2, '0')).join('');
    }})()"""
    return str(page.run(script.format(call=call, token=token, y=y)))


def colour_of(page: Page, name: str) -> str:
    """A colour of the page's style."""
    return str(page.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()"))


def card(page: Page) -> str:
    page.frame()
    script = (
        "(() => { const card = document.getElementById('card');"
        " return card.classList.contains('hidden') ? '' : card.innerText; })()"
    )
    return str(page.run(script))


def num(page: Page, selector: str) -> int:
    return int(page.run(f"document.querySelectorAll('{selector}').length"))


def click(page: Page, node: str) -> None:
    """An element, by a script that gives it."""
    page.run(f"{node}.click()")
    page.frame()


def box_of(page: Page, selector: str) -> dict[str, float]:
    """Where the first such node stands in the view."""
    return dict(page.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()"))


def first_run(page: Page) -> tuple[int, list[int]]:
    """A call that is drawn now and has a run of some width, and the run."""
    found: list[Any] = page.run(
        "(() => { for (const { call } of document.querySelectorAll('.row')) {"
        " const run = call.spans.find((span) => span.donor && span.end - span.start > 100);"
        " if (run) return [call.number, [run.start, run.end, run.shift, run.seamLen, run.donor.number]]; } })()"
    )
    return found[0], found[1]


def test_nothing_goes_wrong_and_nothing_is_asked_for(page: Page, sample: Path) -> None:
    show(page, sample)
    assert page.run("document.documentElement.dataset.state") == "ready"
    assert page.complaints() == []
    assert page.requests() == [sample.as_uri()]
    tiles = page.run("document.getElementById('tiles').innerText").split()
    assert tiles[0] == "36"
    assert num(page, ".cause") >= 3
    assert page.run("document.querySelector('.cause del') !== null && document.querySelector('.cause ins') !== null")


def test_policy_stops_requests_and_foreign_scripts(page: Page, sample: Path) -> None:
    page.open(sample)
    assert page.run("fetch('https://example.com/').then(() => 'sent', () => 'refused')") == "refused"
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert page.run("window.ran === undefined")


def test_ten_thousand_calls_cost_what_is_in_view(page: Page, large: Path) -> None:
    assert large.stat().st_size < 1_000_000
    page.open(large)
    assert int(page.run("document.documentElement.dataset.readyMs")) < 20_000
    to_calls(page)
    assert 20 < num(page, ".row") < MOST_ROWS
    assert num(page, "*") < 1_200
    page.run("window.scrollTo(0, document.documentElement.scrollHeight)")
    page.frame()
    assert num(page, ".row") < MOST_ROWS
    assert "call 99" in rows(page)[-1]
    for share in (0.2, 0.4, 0.6, 0.8):
        page.run(f"window.scrollTo(0, {share} * document.documentElement.scrollHeight)")
        page.frame()
    drawn = int(page.run("document.documentElement.dataset.rowsDrawn"))
    assert drawn < 7 * MOST_ROWS, "only what came into view was ever drawn"
    assert page.complaints() == []


def test_bar_has_the_colours_of_its_spans_and_hover_shows_text_donor_and_position(page: Page, sample: Path) -> None:
    show(page, sample, height=1600, scale="call")
    call, (start, end, shift, _, donor) = first_run(page)
    prefix = page.run(f"document.getElementById('call-{call}').call.prefixLen")
    drawn, run = (colour_at(page, call, token) for token in (prefix * 0.9, (start + end) / 2))
    assert drawn == colour_of(page, "prefix")
    assert run not in (drawn, colour_of(page, "computed"))
    page.move(*place(page, call, (start + end) / 2))
    text = card(page)
    assert f"Chunk hit: {end - start:,} tokens" in text
    assert f"[{start:,}, {end:,})" in text
    assert f"[{start - shift:,}, {end - shift:,})" in text
    index = page.run(f"document.getElementById('call-{donor}')?.call.index")
    assert index is None or f"call {index}" in text
    assert len(page.run("document.querySelector('#card pre').textContent")) > 20
    page.move(*place(page, call, 0))
    assert "Prefix hit" in card(page)
    page.move(5, 5)
    assert card(page) == ""


def test_changed_fields_are_marked(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    calls = prices("seven", "eight", "eight")
    config = CoreConfig(seam_tokens=1, tail_tokens=0)
    _, outcome, _ = serve(calls, config)
    (start, end), at, run = outcome.guarded[0], outcome.prefix_len, outcome.runs[-1]
    show(page, explain(tmp_path_factory, calls, config=config), height=1600, scale="call", cause="changed")
    assert [label.split(":")[0] for label in rows(page)] == ["s · call 1"]
    assert f"{outcome.num_guarded} tokens computed because of a changed field" in rows(page)[0]
    assert colour_at(page, 1, (start + end) / 2) == colour_of(page, "field")
    assert colour_at(page, 1, at + 0.5, y=25) == colour_of(page, "field"), "the mark below the bar"
    assert colour_at(page, 1, run.end - 40, y=25) != colour_of(page, "field")
    page.move(*place(page, 1, (start + end) / 2))
    assert f"Computed because of a changed field: {end - start} tokens" in card(page)
    assert "It may draw on a changed field" in card(page)
    assert "seven →  eight" in card(page).replace("·", " ")
    page.move(*place(page, 1, run.end - 20))
    assert "Spliced behind a changed field" in card(page)
    page.move(*place(page, 1, at + 0.5))
    assert "broke the prefix here" in card(page), "the field is told once"
    assert "changed field" not in card(page)


def test_click_goes_to_the_donor_and_back(page: Page, large: Path) -> None:
    show(page, large, find="session-050", scale="call")
    assert {label[:11] for label in rows(page)} == {"session-050"}
    # Its donor is the last call of the session before, which the filter hides.
    page.click(*place(page, 5_000, 700))
    page.frame()
    assert page.run("document.getElementById('find').value") == ""
    assert page.run("document.querySelector('.row.flash').call.number") == 4_999
    box = box_of(page, ".row.flash")
    assert 100 < box["top"] < box["bottom"] < 900
    click(page, "document.getElementById('back')")
    assert page.run("document.querySelector('.row.flash').call.number") == 5_000
    assert page.run("document.getElementById('back').classList.contains('hidden')")


def test_filter_and_sort(page: Page, large: Path) -> None:
    show(page, large)
    assert num(page, ".session") >= 1
    choose(page, "cause", "clock")
    assert page.run("document.getElementById('shown').textContent") == f"{MANY // 2 - 1:,} of 10,000 calls"
    choose(page, "cause", "lost")
    assert page.run("document.getElementById('shown').textContent") == f"{MANY // 10 - 1:,} of 10,000 calls"
    choose(page, "sort", "lost")
    to_calls(page)
    assert num(page, ".session") == 0
    lost = page.run("[...document.querySelectorAll('.row')].map((row) => row.call.lost)")
    assert lost == sorted(lost, reverse=True)
    choose(page, "find", "no such session")
    assert num(page, ".row") == 0
    assert page.run("!document.getElementById('empty').classList.contains('hidden')")
    click(page, "document.getElementById('reset')")
    assert page.run("document.getElementById('shown').textContent") == "10,000 calls"


def test_cause_opens_to_its_calls_and_leads_to_their_bars(page: Page, sample: Path) -> None:
    page.open(sample)
    click(page, "document.querySelector('details.place summary')")
    links = "document.querySelectorAll('details.place[open] button.link')"
    assert page.run(f"{links}.length") >= 1
    lost = page.run("[...document.querySelectorAll('.cause')].map((node) => node.dataset.cause)")
    assert lost[0] == "field"
    click(page, f"{links}[0]")
    assert page.run("document.querySelector('.row.flash').call.found.group.cause.key") == "field"
    click(page, "[...document.querySelectorAll('.cause footer button')].at(-1)")
    assert page.run("document.getElementById('cause').value") != ""


def test_keys_walk_calls_and_spans(page: Page, sample: Path) -> None:
    show(page, sample, cause="lost")
    page.run("document.getElementById('bars').focus()")
    page.press("Home")
    active = "document.querySelector('.row.active').call.number"
    assert "Computed" in card(page), "the break is where it begins"
    while not page.run("document.querySelector('.row.active').call.spans.some((span) => span.donor)"):
        page.press("ArrowDown")
    first = page.run(active)
    page.press("ArrowRight")
    assert "Chunk hit" in card(page)
    page.press("ArrowDown")
    assert page.run(active) > first
    page.press("ArrowUp")
    assert page.run(active) == first
    assert page.run("document.getElementById('bars').getAttribute('aria-activedescendant')") == f"call-{first}"
    donor = page.run(f"document.getElementById('call-{first}').call.spans.find((span) => span.donor).donor.number")
    page.press("ArrowRight")
    page.press("Enter")
    page.frame()
    assert page.run(active) == donor


def test_touch_shows_the_card_first_and_goes_to_the_donor_by_its_button(page: Page, sample: Path) -> None:
    page.open(sample, width=400, height=800)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    choose(page, "cause", "lost")
    choose(page, "scale", "call")
    to_calls(page)
    call, (start, end, _, _, donor) = first_run(page)
    x, y = place(page, call, (start + end) / 2)
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.frame()
    assert "Go to the donor" in card(page)
    assert page.run("document.querySelector('.row.flash') === null")
    click(page, "document.querySelector('#card .buttons button')")
    assert page.run("document.querySelector('.row.flash').call.number") == donor
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)


def test_text_is_never_taken_for_markup(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u2028 ${`x`} {brace}"
    texts = [chat(f"{evil} mode {word}.\n{BODY}", evil) for word in ("one", "two")]
    calls = [call_of(each, evil, session=f"{evil}A", index=at, agent=evil) for at, each in enumerate(texts)]
    page.open(explain(tmp_path_factory, calls, evil))
    page.run("document.querySelector('details.place summary').click()")
    choose(page, "scale", "call")
    to_calls(page)
    page.move(*place(page, 1, 20))
    shown = card(page)
    assert "<script>window.hacked" in shown
    assert page.run("document.querySelector('.place .diff').textContent").count("<img") >= 1
    assert page.run("window.hacked === undefined")
    assert num(page, "img") == 0
    assert num(page, "script") == 1
    assert page.complaints() == []


def test_one_call_and_no_breaks(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    show(page, explain(tmp_path_factory, [call_of(chat("You are.", "Hello."))]))
    assert "Nothing broke" in page.run("document.getElementById('causes').innerText")
    assert "1 call" in page.run("document.getElementById('shown').textContent")
    assert len(rows(page)) == 1
    page.open(explain(tmp_path_factory, []))
    assert page.complaints() == []
    page.open(explain(tmp_path_factory, [call_of(chat("One.", "x")), call_of(chat("Two.", "y"), session="t")]))
    assert "the text is new" in page.run("document.getElementById('causes').innerText")


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_screen(page: Page, tmp_path_factory: pytest.TempPathFactory, width: int) -> None:
    name = "a-very-long-name-of-a-session" * 12
    texts = [chat(f"mode {number}.\n{BODY}", "x" * 300) for number in range(3)]
    calls = [call_of(each, session=name, index=at, agent="agent" * 30) for at, each in enumerate(texts)]
    show(page, explain(tmp_path_factory, calls, name), width=width, height=800, dark=True)
    assert page.run("document.documentElement.scrollWidth") == width
    rows_fit = "every((row) => row.scrollWidth <= row.clientWidth + 1)"
    assert page.run(f"[...document.querySelectorAll('.row, .session')].{rows_fit}")
    page.run("document.getElementById('bars').focus()")
    page.press("End")
    box = box_of(page, "#card")
    assert 0 <= box["left"] < box["right"] <= width
    assert 0 <= box["top"] < box["bottom"] <= 800


def test_paper_is_light_and_has_the_first_calls(page: Page, large: Path) -> None:
    page.open(large, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    page.frame()
    assert num(page, ".row") > 100
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    page.run("window.dispatchEvent(new Event('afterprint'))")
    page.call("Emulation.setEmulatedMedia", media="")
    page.frame()
    assert num(page, ".row") < MOST_ROWS
