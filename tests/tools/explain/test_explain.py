"""explain: what the command writes, prints and refuses, and what the page has."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from pic_traces import load
from pic_traces.encode import load_encoder
from pic_traces.session import Call
from rich.table import Table

from sglang_pic.census.simulate import simulate
from sglang_pic.census.table import as_text
from sglang_pic.cli import main
from sglang_pic.core import CoreConfig
from sglang_pic.explain import page as page_module
from sglang_pic.explain.grouping import NUM_EXAMPLES, Findings
from sglang_pic.explain.page import html_page
from tests.helpers.explain_fakes import BODY, call_of, chat, prices, serve


def find(trace: str) -> Findings:
    findings = Findings()
    for outcome in simulate([(trace, load(trace))], load_encoder(None)):
        findings.add(outcome)
    return findings


def page_of(findings: Findings, title: str = "a title") -> str:
    return html_page(findings, title, "words", is_exact=False)


def page_of_calls(*calls: Call, title: str = "a title") -> str:
    findings = Findings()
    for outcome in serve(calls):
        findings.add(outcome)
    return page_of(findings, title)


def test_losses_add_up() -> None:
    """A spliced token is after a break, or in a call without one: none is counted twice or left out."""
    findings = find("sample:opendevin")
    causes, figures = findings.ranked(), findings.figures
    recovered = sum(group.total.num_spliced for group in causes)
    assert recovered + figures.appended_tokens == figures.chunk_tokens > 0
    for group in causes:
        assert all(place.num_spliced <= place.num_lost <= place.num_behind for place in group.places)
        for name in ("num_calls", "num_lost", "num_spliced", "num_behind"):
            assert getattr(group.total, name) == sum(getattr(place, name) for place in group.places)
    lost = [group.total.num_lost for group in causes]
    assert lost == sorted(lost, reverse=True)


def test_examples_are_the_calls_that_lost_most_and_their_texts_are_bounded() -> None:
    findings = Findings()
    found = [findings.add(outcome) for outcome in simulate([("f", load("gen:sysvar?sessions=3"))], load_encoder(None))]
    (group,) = (group for group in findings.ranked() if group.total.num_lost)
    lost = sorted((one.num_lost for one in found if one is not None), reverse=True)
    assert [one.found.num_lost for one in group.total.examples] == lost[:NUM_EXAMPLES]
    assert all(len(text) <= 250 for one in found if one is not None for text in (one.old, one.new))


def test_what_is_computed_because_of_a_changed_field() -> None:
    findings = Findings()
    for outcome in serve(prices("seven", "eight"), CoreConfig(seam_tokens=1, tail_tokens=0)):
        findings.add(outcome)
    (example,) = findings.ranked()[0].places[0].examples
    assert example.num_guarded == outcome.num_guarded == findings.figures.guarded_tokens > 0
    assert (example.found.old, example.found.new) == (" seven", " eight")
    assert f"computed because of a changed field (guarded): {outcome.num_guarded} tokens" in page_of(findings)
    assert "computed because of a changed field" not in page_of(find("gen:random?sessions=1"))


def test_the_page_names_cause_place_and_remedy_and_is_bounded() -> None:
    page = page_of(find("sample:opendevin"))
    assert page == page_of(find("sample:opendevin")), "it is deterministic"
    places = [part.count('class="place"') for part in page.split('class="cause"')[1:]]
    assert 0 < max(places) <= page_module._NUM_PLACES
    assert page.index("Another short field</b>") < page.index("<h2>"), "the first sentence has the worst cause"
    assert '"state": "' in page.replace("&#34;", '"')
    assert "<del>in_progress</del> → <ins>completed</ins>" in page
    assert "In the harness: write counters" in page


def test_a_page_without_breaks() -> None:
    assert "Nothing broke" in page_of(Findings())
    assert "Nothing broke" in page_of_calls(call_of(chat("You are.", "Hello.")))
    calls = call_of(chat("One.", "x")), call_of(chat("Two.", "y"), session="t")
    assert "the text is new" in page_of_calls(*calls)


def test_text_is_never_taken_for_markup_and_nothing_can_be_loaded() -> None:
    evil = "</style><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 }}"
    texts = [chat(f"{evil} mode {word}.\n{BODY}", evil) for word in ("one", "two")]
    calls = [call_of(each, evil, session=f"{evil}A", index=at, agent=evil) for at, each in enumerate(texts)]
    page = page_of_calls(*calls, title=evil)
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("</style>") == 1
    assert page.count("&lt;script&gt;window.hacked = 1&lt;/script&gt;") > 4
    assert "default-src 'none'; style-src 'unsafe-inline'" in page


SAMPLE = "sample:opendevin"
Capture = pytest.CaptureFixture[str]


def test_page_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["explain", SAMPLE, "gen:sysvar?sessions=1", "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0].startswith("56 calls, ")
    at = next(number for number, line in enumerate(lines) if "what broke" in line)
    columns = ["lost", "spliced", "guarded", "calls", "what", "broke", "the", "prefix", "worst", "place"]
    assert lines[at].split() == columns
    assert "A clock or a date" in lines[at + 1], "worst first"
    assert "In the harness: write the time into the last user message" in printed
    assert lines[-1].startswith(f"page: {out} (")
    assert list(tmp_path.iterdir()) == [out]


def test_names_of_files_need_not_be_utf_8(tmp_path: Path) -> None:
    """Requests without an id are sessions named after their file, and what is written is UTF-8."""
    logs, page, fixed = tmp_path / "logs", tmp_path / "page.html", tmp_path / "fixed.jsonl"
    logs.mkdir()
    for name in (b"caf\xe9.jsonl", b"other.jsonl"):
        call = {"messages": [{"role": "user", "content": f"Look. It is {len(name)} o'clock. {BODY * 4}"}]}
        (logs / os.fsdecode(name)).write_text(json.dumps(call))
    assert main(["explain", str(logs), "--out", str(page)]) == 0
    assert main(["fix", str(logs), "--out", str(fixed)]) == 0
    assert r"caf\udce9" in page.read_text("utf8")
    assert r"caf\\udce9" in fixed.read_text("utf8")


def test_limits_and_nothing_to_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "page.html"), "--force"]
    assert main(["explain", SAMPLE, *out, "--limit-calls", "3", "--limit-sessions", "1"]) == 0
    assert capsys.readouterr().out.startswith("3 calls, ")
    assert main(["explain", "gen:random?sessions=3", *out]) == 0
    assert "No break cost tokens" in capsys.readouterr().out


def test_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = ["explain", SAMPLE, "--limit-calls", "1", "--out", str(tmp_path / "page.html")]
    with monkeypatch.context() as patch:
        patch.setattr(page_module, "html_page", interrupt)
        assert main(words) == 130
    # At the worst moment: everything is written and not yet in its place.
    monkeypatch.setattr(Path, "replace", interrupt)
    assert main(words) == 130
    assert list(tmp_path.iterdir()) == []


PLAN = "".join(
    f"- [ ] If valve {k} fails, ask the keeper of hall {k * 7 % 13} and note what was said.\n" for k in range(30)
)


def rows_of(printed: str) -> list[list[str]]:
    """The figures of the table's rows: lost, spliced, guarded, calls."""
    lines = printed.splitlines()
    at = next(number for number, line in enumerate(lines) if "spliced  guarded" in line)
    # A long text goes on in the next line, behind empty cells.
    figures = [line[: lines[at].index("what broke")].split() for line in lines[at + 1 : lines.index("", at)]]
    rows = [row for row in figures if row]
    assert all(len(row) == 4 and re.fullmatch(r"[\d,]+|-", cell) for row in rows for cell in row), "no figure is cut"
    return rows


def sum_of(rows: list[list[str]], column: int) -> int:
    return sum(int(row[column].replace(",", "")) for row in rows if row[column] != "-")


def test_three_verbs_count_the_same_spliced_tokens(tmp_path: Path, capsys: Capture) -> None:
    assert main(["census", SAMPLE, "--json", "--quiet"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    changed = total["detail"]["changed_fields"]
    assert changed["guarded_tokens"] > 1_000
    assert main(["explain", SAMPLE, "--quiet", "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert sum_of(rows, 1) == total["chunk_tokens"]
    assert sum_of(rows, 2) == changed["guarded_tokens"]
    share = f"{total['chunk_tokens'] / total['prompt_tokens']:.1%}"
    assert f"spliced {share}, computed" in printed
    assert main(["fix", SAMPLE, "--quiet"]) == 0
    assert re.search(rf"as recorded +[\d,]+ +[\d.]+% +{re.escape(share)} ", capsys.readouterr().out)


def test_a_table_of_large_figures_is_wider_than_the_text() -> None:
    table = Table("", *("figure",) * 9, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.no_wrap = True
    table.add_row("a name", *("12,345.67 M 100.0%",) * 9)
    assert as_text(table).count("12,345.67 M 100.0%") == 9


def test_the_page_says_what_was_there_what_is_guarded_and_what_would_splice_it(tmp_path: Path, capsys: Capture) -> None:
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    plans = [PLAN, PLAN.replace("[ ]", "[x]", 1), PLAN.replace("[ ]", "[x]", 2)]
    calls = [
        [{"role": "system", "content": f"You help a crew.\n{plan}"}, {"role": "user", "content": "Go."}]
        for plan in plans
    ]
    log.write_text("".join(json.dumps({"messages": call, "session_id": "s"}) + "\n" for call in calls))
    assert main(["explain", str(log), "--quiet", "--out", str(page)]) == 0
    printed, shown = capsys.readouterr().out, re.sub(r"<[^>]+>|\s+", " ", page.read_text()).replace("  ", " ")
    ((lost, spliced, guarded, _),) = rows_of(printed)
    assert spliced == "0"
    assert guarded != "0"
    assert f"{lost} more tokens were there before" in shown
    assert f"{guarded} tokens that were there before are guarded" in shown
    assert "With --edit in_place it would splice" in " ".join(shown.split())
    assert "With --edit in_place" in printed
    assert "Nothing else in them was there before" not in shown
    assert str(tmp_path) not in page.read_text(), "a page that is passed on has no folder of whoever made it"
