"""explain: what the command writes, prints and refuses; what the page is told, and how much of it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import msgspec
import pytest
from explain_fakes import prices, serve
from pic_traces import load
from pic_traces.encode import load_encoder

from sglang_pic.census.simulate import simulate
from sglang_pic.cli import main
from sglang_pic.core import CoreConfig
from sglang_pic.explain import page as page_module
from sglang_pic.explain.data import Figures, Payload, PayloadBuilder
from sglang_pic.explain.page import html_page
from sglang_pic.explain.snippets import ELLIPSIS, SnippetPool, quote


def build(trace: str, **options: int) -> tuple[PayloadBuilder, Payload]:
    encoder = load_encoder(None)
    builder = PayloadBuilder(**{"num_calls": 100, **options})
    for outcome in simulate([(trace, load(trace))], encoder):
        builder.add(outcome)
    return builder, builder.build(encoder.name, is_exact=encoder.is_exact)


@pytest.mark.parametrize("trace", ["sample:opendevin", "gen:sysvar?sessions=2", "gen:random?sessions=3"])
def test_calls_are_whole(trace: str) -> None:
    builder, payload = build(trace)
    assert len(payload.calls) == sum(group.num_calls for group in payload.groups) + sum(
        call.found is None for call in payload.calls
    )
    for number, call in enumerate(payload.calls):
        at = last_run = 0
        for span in call.spans:
            assert at == span.start < span.end
            if span.donor is not None:
                assert span.start - span.shift >= 0
                assert span.seam_len <= span.start - max(last_run, call.prefix_len)
                assert span.donor < number
                last_run = span.end
            at = span.end
        assert at == call.prompt_len
        assert max(span.text for span in call.spans) < len(payload.texts)
    runs = [span for call in payload.calls for span in call.spans if span.donor is not None]
    assert builder.figures.chunk_tokens == sum(span.end - span.start for span in runs)
    assert all(len(text) <= 260 for text in payload.texts)


def test_losses_add_up() -> None:
    """What can be recovered stands behind a break or in a call that continues: nothing is counted twice or left out."""
    builder, payload = build("sample:opendevin")
    recovered = sum(group.num_recovered for group in payload.groups)
    figures = builder.figures
    assert recovered + figures.appended_tokens == figures.chunk_tokens + figures.guarded_tokens
    assert all(group.num_recovered <= group.num_lost <= group.num_behind for group in payload.groups)
    lost = sum(group.num_lost for group in payload.groups)
    assert lost == sum(call.found.num_lost for call in payload.calls if call.found)
    assert lost == sum(group.num_lost for group in builder.grouping.ranked())


def test_changed_fields_and_what_is_computed_because_of_them() -> None:
    builder = PayloadBuilder(2)
    for outcome in serve(prices("seven", "eight"), CoreConfig(seam_tokens=1, tail_tokens=0)):
        builder.add(outcome)
    payload = builder.build("words", is_exact=False)
    call = payload.calls[1]
    (field,) = call.changed_fields
    assert [payload.texts[text] for text in (field.old, field.new)] == [" seven", " eight"]
    assert payload.texts[field.before].endswith("Price:")
    assert [(span.start, span.end) for span in call.spans if span.is_guarded] == list(outcome.guarded)
    assert len(outcome.guarded) >= 2
    assert [span.is_behind_change for span in call.spans if span.donor is not None] == [True] * len(outcome.runs)
    assert payload.calls[0].changed_fields == []
    figures = builder.figures
    assert (figures.changed_calls, figures.guarded_tokens) == (1, outcome.num_guarded)
    assert figures.behind_change_tokens == figures.chunk_tokens == outcome.num_chunk_hit
    page = html_page(payload, figures, "a title")
    assert "computed because of a changed field</span>" in page
    builder, payload = build("gen:random?sessions=1")
    assert "computed because of a changed field</span>" not in html_page(payload, builder.figures, "a title")


def test_text_is_bounded_by_the_page_and_by_the_call() -> None:
    _, payload = build("sample:opendevin", max_bytes=5_000)
    assert sum(map(len, payload.texts)) <= 5_000
    assert payload.num_texts_left_out > 0
    _, many = build("sample:opendevin", num_calls=10_000_000)
    assert max(sum(len(many.texts[span.text]) for span in call.spans) for call in many.calls) < 1_000


def test_page_is_deterministic_and_carries_the_payload() -> None:
    builder, payload = build("sample:opendevin")
    page = html_page(payload, builder.figures, "a title")
    again, same = build("sample:opendevin")
    assert page == html_page(same, again.figures, "a title")
    packed = re.search(r'id="payload">([A-Za-z0-9+/=]*)</script>', page)
    assert msgspec.json.decode(zlib.decompress(base64.b64decode(packed[1])), type=Payload) == payload


def test_title_is_escaped() -> None:
    payload = PayloadBuilder(0).build("words", is_exact=False)
    page = html_page(payload, Figures(), "</title><script>alert(1)</script>{x}")
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;{x}") == 2


def test_quote_keeps_head_and_tail_and_a_pool_a_text_once() -> None:
    text = "abcdefghij" * 100
    quoted = quote(lambda start, end: text[4 * start : 4 * end], 0, len(text) // 4, 60)
    assert quoted == f"{text[:40]}{ELLIPSIS}{text[-20:]}"
    assert quote(lambda start, end: text[start:end], 5, 25, 60) == text[5:25]
    assert quote(lambda start, end: "long words " * (end - start), 0, 3, 20).count(ELLIPSIS) == 1
    pool = SnippetPool(max_bytes=5)
    assert [pool.add(text) for text in ("ab", "", "ab", "cde", "f", "ab")] == [1, 0, 1, 2, 0, 1]
    assert pool.num_refused == 1


SAMPLE = "sample:opendevin"
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def test_page_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["explain", SAMPLE, "gen:sysvar?sessions=1", "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    printed, err = capsys.readouterr()
    assert err == ""
    lines = printed.splitlines()
    assert lines[0].startswith("56 calls, ")
    assert lines[2].split() == ["lost", "recovered", "calls", "what", "broke", "the", "prefix", "worst", "place"]
    assert "A clock or a date" in lines[3], "worst first"
    assert "In the harness: tell the time in the last user message" in printed
    assert lines[-1].startswith(f"page: {out} (")
    assert list(tmp_path.iterdir()) == [out]


def test_what_terminals_obey_is_printed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = "The quick brown fox jumps over the lazy dog. " * 100
    calls = [[{"role": "system", "content": f"\x1b]0;evil\x07 \x9b2J {n} {shared}"}] for n in range(3)]
    log = tmp_path / "secret-folder" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"messages": call}) + "\n" for call in calls))
    out = tmp_path / "page.html"
    assert main(["explain", str(log), "--out", str(out)]) == 0
    (tmp_path / "bad\x1b.jsonl").write_text("{")
    assert main(["census", str(tmp_path / "bad\x1b.jsonl")]) == 1
    printed = "".join(capsys.readouterr())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed)
    assert printed.count("\\u001b") >= 2
    assert "secret-folder" not in html_payload(out)
    assert main(["explain", str(log), "--out", "/proc/x.html"]) == 2


def html_payload(page: Path) -> str:
    packed = re.search(r'id="payload">([^<]+)<', page.read_text())
    assert packed is not None
    return zlib.decompress(base64.b64decode(packed[1])).decode()


def test_limits_and_nothing_to_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "page.html"), "--force"]
    assert main(["explain", SAMPLE, *out, "--limit-calls", "3", "--limit-sessions", "1"]) == 0
    assert capsys.readouterr().out.startswith("3 calls, ")
    assert main(["explain", "gen:random?sessions=3", *out]) == 0
    assert "No break cost tokens" in capsys.readouterr().out


def test_page_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    assert main(["explain", SAMPLE, "--out", str(out), "--limit-calls", "1"]) == 2
    assert out.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["explain", SAMPLE, "--out", str(out), "--limit-calls", "1", "--force"]) == 0
    assert out.read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out page.html --limit-calls 0", "--limit-calls=0"),
        ("--out page.html --limit-sessions -2", "--limit-sessions=-2"),
        (f"{SAMPLE} --out page.html", "named twice"),
        ("--out no/page.html", "no/page.html"),
        ("--out .", "is a folder"),
    ],
)
def test_bad_values_are_usage(words: str, message: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", SAMPLE, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n', "no text"),
        ('{"messages": [{"role": "user", "content": "x"}]}\nnot json\n', "log.jsonl:2"),
    ],
)
def test_a_wrong_last_file_is_found_first(text: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "log.jsonl"
    trace.write_text(text)
    words = ["explain", SAMPLE, str(trace), "--strict", "--out", str(tmp_path / "page.html")]
    assert main(words) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [trace]


def test_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["explain", SAMPLE, "--limit-calls", "1", "--out", str(tmp_path / "page.html")]
    with monkeypatch.context() as patch:
        patch.setattr(page_module, "html_page", interrupt)
        assert main(words) == 130
    # At the worst moment: everything is written and not yet in its place.
    monkeypatch.setattr(Path, "replace", interrupt)
    assert main(words) == 130
    assert list(tmp_path.iterdir()) == []
