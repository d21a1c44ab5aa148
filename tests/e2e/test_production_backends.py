"""A whole server on one of SGLang's production attention backends, without its kernels or with interpreted ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e.servers import on_each_server, on_servers
from tests.e2e.serving import Answer, Client, assert_same, divergence, random_tokens

pytestmark = pytest.mark.e2e


@on_each_server(("gqa_page16", "gqa_page16.fa3"), ("mla_page1", "mla_page1.fa3"), ("gqa_page16", "gqa_page16.triton"))
def test_it_answers_as_the_cpu_backend_does(servers: tuple[str, ...], client_of: Callable[[str], Client]) -> None:
    """In float32, at shift 0, shifted, and with prompts longer than a prefill chunk.

    With SGLang's kernels interpreted every pass takes seconds: one prompt of two chunks.
    """
    lengths, new_tokens = ((230,), 2) if servers[1].endswith("triton") else ((150, 600), 8)
    # One server after the other.
    reference, answers = (answers_of(client_of(server), lengths, new_tokens) for server in servers)
    hits = [answer.chunk_hit_tokens for answer in answers]
    assert hits == [answer.chunk_hit_tokens for answer in reference]
    assert all(count > 0 for count in hits[1::2])
    for one, other in zip(reference, answers, strict=True):
        assert_same(one, other)


@pytest.mark.feature("deterministic inference")
@on_servers("gqa_page16.fa3")
def test_with_deterministic_inference_requests_opt_in(client: Client) -> None:
    """Others are computed whatever runs beside them, and share no row with those that opted in."""
    text = random_tokens(30, 400)
    moved = [*random_tokens(31, 60), *text]
    plain = client.generate(moved)
    client.generate(text, pic={"mode": "auto"})
    before = client.counters()
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(client.generate, moved, pic={"mode": "auto"})
        again = pool.submit(client.generate, moved).result()
    assert beside.result().chunk_hit_tokens >= len(text) - 32 - 16
    assert again.chunk_hit_tokens == plain.chunk_hit_tokens == 0
    assert again.ids == plain.ids
    assert divergence(plain.first_token, again.first_token) <= 1e-6
    assert client.grown(before)["fallbacks:off"] == 1
    (said,) = re.findall("sglang_pic: (With deterministic inference.*)", client.log())
    assert said.endswith("only if it asks for mode auto: the default mode is off there.")


def answers_of(client: Client, lengths: Sequence[int], new_tokens: int) -> list[Answer]:
    """Computed and spliced answers in turn."""
    # A server with deterministic inference splices only for requests that ask for it.
    generate = partial(client.generate, max_new_tokens=new_tokens, pic={"mode": "auto"})
    answers = []
    for seed, length in enumerate(lengths):
        prompt, fresh = random_tokens(seed, length), random_tokens(10 + seed, 90)
        moved = [*fresh[:50], *prompt[40 : length - 20], *fresh[50:]]
        answers += [generate(prompt), generate(prompt)]
        answers += [generate(random_tokens(20 + seed, length)), generate(moved)]
    return answers
