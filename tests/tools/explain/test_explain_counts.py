"""Tokens are counted once: `census`, `explain` and `fix` say the same, and no width of a terminal cuts a figure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.table import Table

from sglang_pic.census.table import WIDTH, as_text
from sglang_pic.cli import main

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
SAMPLE = "sample:opendevin"
PLAN = "".join(
    f"- [ ] If valve {k} fails, ask the keeper of hall {k * 7 % 13} and note what was said.\n" for k in range(30)
)


def rows_of(printed: str) -> list[list[str]]:
    """The figures of the table's rows: lost, spliced, guarded, calls."""
    lines = printed.splitlines()
    at = next(number for number, line in enumerate(lines) if "spliced  guarded" in line)
    rows = [line.split()[:4] for line in lines[at + 1 : lines.index("", at)]]
    assert all(re.fullmatch(r"[\d,]+|-", cell) for row in rows for cell in row), "no figure is cut"
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


@pytest.mark.parametrize("columns", ["20", "60", "80", "300"])
def test_a_terminal_of_any_width_cuts_texts_and_no_figure(
    columns: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    words = ["explain", SAMPLE, "--quiet", "--force", "--out", str(tmp_path / "page.html")]
    assert main(words) == 0
    rows = rows_of(capsys.readouterr().out)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert rows_of(printed) == rows
    table = printed.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= max(60, min(int(columns), WIDTH))


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
