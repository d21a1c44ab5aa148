"""Prompts with images on a server: spliced with them, and never with another prompt's image."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.servers import on_each_server, on_servers
from tests.e2e.serving import IMAGE, A, Answer, B, C, Client, assert_same, image, leave_for_the_host, words

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("images in prompts", "Qwen2_5_VLForConditionalGeneration", "MRotaryEmbedding"),
]
on_device = on_servers("qwen_vl_page1")
on_host = on_each_server("qwen_vl_page1.host", "qwen_vl_page64.host")


def ask(client: Client, text: str, images: Sequence[str], pic: object = None) -> Answer:
    return client.generate(text, pic=pic, image_data=images)


@on_device
def test_shift_zero_equals_full_prefill(client: Client) -> None:
    """In float32; the full prefill has several chunks, and answers are decoded behind images."""
    text = IMAGE.join(words(client, seed, count) for seed, count in ((1, 150), (2, 90), (3, 60)))
    full = ask(client, text, [A, B])
    assert full.cached_tokens == 0
    spliced = ask(client, text, [A, B])
    assert spliced.chunk_hit_tokens >= full.prompt_tokens - 32 - 1, "all but the sink and the last token"
    assert_same(full, spliced)


@on_device
def test_equal_text_around_another_image_shares_no_row_of_the_image(client: Client) -> None:
    before, behind = words(client, 11, 150), words(client, 12, 60)
    full = ask(client, before + IMAGE + behind, [C], {"mode": "off"})
    ask(client, before + IMAGE + behind, [image(4, 140, 336)])
    spliced = ask(client, before + IMAGE + behind, [C], {"edit": "recompile"})
    assert 0 < spliced.chunk_hit_tokens < 160
    assert_same(full, spliced)


@on_device
def test_moved_images_in_mixed_batches(client: Client) -> None:
    """Behind another image, beside requests with and without media; every slot is given back."""
    body = words(client, 21, 100) + IMAGE + words(client, 22, 90)
    ask(client, body, [A])
    moved = words(client, 23, 60) + IMAGE + words(client, 24, 40) + body
    asked = [(moved, [B, A]), (words(client, 25, 80), []), (words(client, 26, 30) + IMAGE, [C]), (body, [A])]
    before = client.counters()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [*pool.map(lambda each: ask(client, *each), asked)]
    grown = client.grown(before)
    assert sum(grown[f"tokens:{source}"] for source in ("prefix", "chunk", "computed")) == grown["prompt_tokens"]
    assert grown["fallbacks:media"] == 0
    # With the image's 70 tokens.
    assert answers[0].chunk_hit_tokens > 70 + 100
    assert answers[1].chunk_hit_tokens == answers[2].chunk_hit_tokens == 0
    assert client.audit()["num_audited"] == 0, "an audit would compute token ids alone"
    assert client.counters()["audit_skipped_requests:media"] > 0


@pytest.mark.feature("HiCache with images")
@on_host
def test_images_whose_rows_left_for_the_host_are_spliced_at_shift_zero(client: Client) -> None:
    text = IMAGE.join(words(client, seed, count) for seed, count in ((1, 150), (2, 190), (3, 160)))
    full = ask(client, text, [A, B])
    assert full.cached_tokens == 0
    leave_for_the_host(client)
    spliced = ask(client, text, [A, B])
    assert spliced.fetched_tokens == spliced.chunk_hit_tokens > full.prompt_tokens - 128
    assert_same(full, spliced)


@pytest.mark.feature("HiCache with images")
@on_host
def test_moved_images_are_spliced_from_the_host_as_from_the_device(client: Client) -> None:
    """To the last bit; behind another image, so that rows move by another distance than their keys are rotated."""
    body = words(client, 21, 200) + IMAGE + words(client, 22, 190)
    moved = words(client, 23, 60) + IMAGE + words(client, 24, 40) + body + words(client, 25, 70)
    answers = []
    for leaves in (False, True):
        client.flush()
        ask(client, body, [A])
        if leaves:
            leave_for_the_host(client)
        answers.append(ask(client, moved, [B, A]))
    device, host = answers
    assert device.fetched_tokens == 0 < host.fetched_tokens == host.chunk_hit_tokens
    assert host.chunk_hit_tokens == device.chunk_hit_tokens > 70 + 200
    assert_same(device, host)
    assert not [name for name in client.counters() if name.startswith("store_")], "no store can be attached"
