"""What the page is told, and how much of it."""

from __future__ import annotations

import base64
import re
import zlib

import msgspec
import numpy as np
import pytest
from explain_fakes import call_of, chat, prices, serve
from pic_traces import load
from pic_traces.encode import load_encoder

from sglang_pic.census.simulate import simulate
from sglang_pic.core import CoreConfig
from sglang_pic.explain.data import Payload, PayloadBuilder
from sglang_pic.explain.lexicon import Lexicon
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
    _, payload = build(trace)
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
    assert payload.figures().hit_len == sum(call.hit_len for call in payload.calls)
    assert all(len(text) <= 260 for text in payload.texts)


def test_losses_add_up() -> None:
    """What can be recovered stands behind a break or in a call that continues: nothing is counted twice or left out."""
    builder, payload = build("sample:opendevin")
    lost = sum(group.num_lost for group in payload.groups)
    figures = payload.figures()
    assert lost + figures.appended_len == figures.hit_len + figures.guarded_len
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
    figures = payload.figures()
    assert (figures.num_changed, figures.guarded_len) == (1, outcome.num_guarded)
    assert figures.behind_change_len == figures.hit_len == outcome.num_chunk_hit
    page = html_page(payload, "a title")
    assert "computed because of a changed field</span>" in page
    assert "computed because of a changed field</span>" not in html_page(build("gen:random?sessions=1")[1], "a title")


def test_text_is_bounded_by_the_page_and_by_the_call() -> None:
    _, payload = build("sample:opendevin", max_bytes=5_000)
    assert sum(map(len, payload.texts)) <= 5_000
    assert payload.num_texts_left_out > 0
    _, many = build("sample:opendevin", num_calls=10_000_000)
    assert max(sum(len(many.texts[span.text]) for span in call.spans) for call in many.calls) < 1_000


def test_page_is_deterministic_and_carries_the_payload() -> None:
    _, payload = build("sample:opendevin")
    page = html_page(payload, "a title")
    assert page == html_page(build("sample:opendevin")[1], "a title")
    packed = re.search(r'id="payload">([A-Za-z0-9+/=]*)</script>', page)
    assert packed is not None
    assert msgspec.json.decode(zlib.decompress(base64.b64decode(packed[1])), type=Payload) == payload


def test_title_is_escaped() -> None:
    page = html_page(PayloadBuilder(0).build("words", is_exact=False), "</title><script>alert(1)</script>{x}")
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;{x}") == 2


def test_lexicon_gives_back_what_it_learnt() -> None:
    lexicon = Lexicon()
    encoded = load_encoder(None).encode(call_of(chat("You are Ödön, 東京.", "x = {1: 2}"), "fine"))
    lexicon.learn(encoded, 3)
    assert lexicon.decode(encoded.path[3:]) == encoded.text(3, len(encoded.path))
    assert lexicon.decode(np.array([9_999], np.int32)) == "\ufffd"


def test_quote_keeps_head_and_tail() -> None:
    text = "abcdefghij" * 100
    quoted = quote(lambda start, end: text[4 * start : 4 * end], 0, len(text) // 4, 60)
    assert quoted == f"{text[:40]}{ELLIPSIS}{text[-20:]}"
    assert quote(lambda start, end: text[start:end], 5, 25, 60) == text[5:25]
    assert quote(lambda start, end: "long words " * (end - start), 0, 3, 20).count(ELLIPSIS) == 1


def test_pool_keeps_a_text_once() -> None:
    pool = SnippetPool(max_bytes=5)
    assert [pool.add(text) for text in ("ab", "", "ab", "cde", "f", "ab")] == [1, 0, 1, 2, 0, 1]
    assert pool.num_refused == 1
